"""What requests may hold: fields as in OpenAI's and vLLM's interfaces, each with its bounds.

A field that exists there and is not served is refused by name unless its value asks for nothing;
one that nobody knows is refused too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

LONGEST_NAME = 1024
_LONGEST_STOP = 4096
_MOST_STOPS = 16
_MOST_BIASES = 1024
_LARGEST = 2**31 - 1


def _refuse_unserved(value: Any) -> Any:
    if value is None or value is False or value == [] or value == {}:
        return value
    raise PydanticCustomError("unserved", "is not served by this server; leave it out")


#: A field that is known, and not served: only what asks for nothing is accepted.
Unserved = Annotated[Any, AfterValidator(_refuse_unserved)]
#: An identifier of the caller's, of no effect here.
Label = Annotated[str, Field(max_length=LONGEST_NAME)] | None

TokenId = Annotated[int, Field(ge=0, le=_LARGEST)]
Stop = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
#: By token id, which JSON writes as text.
LogitBias = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[0-9]{1,10}$")],
        Annotated[float, Field(ge=-100.0, le=100.0)],
    ],
    Field(max_length=_MOST_BIASES),
]


def _refuse_surrogates(value: Any) -> Any:
    """Halves of characters, which JSON can escape, and no text can hold."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError as error:
                message = "a text holds half a surrogate pair, which is no character"
                raise PydanticCustomError("surrogate", message) from error
        elif isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list) and not (item and isinstance(item[0], int)):
            waiting += item
    return value


class Body(BaseModel):
    """A request's body.  JSON's own types are not converted into one another."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    _only_characters = model_validator(mode="before")(_refuse_surrogates)

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, value: Any) -> Any:
        # As OpenAI has it: clients send null for whatever they leave to the server.
        if not isinstance(value, dict):
            return value
        return {k: v for k, v in value.items() if v is not None or k not in cls.model_fields}


class StreamOptions(Body):
    """How an answer is streamed.

    Attributes:
        include_usage: a last event tells how many tokens there were.
        continuous_usage_stats: every event does.
        include_obfuscation: not served.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Unserved = None


class ResponseFormat(Body):
    """What an answer has to look like: any text."""

    type: Literal["text"]


class GenerationBody(Body):
    """What both kinds of generation take; None leaves a value to the model and the server."""

    model: str | None = Field(None, max_length=LONGEST_NAME)
    n: int = Field(1, ge=1, le=_LARGEST)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Label = None

    max_tokens: int | None = Field(None, ge=1, le=_LARGEST)
    min_tokens: int = Field(0, ge=0, le=_LARGEST)
    temperature: float | None = Field(None, ge=0.0, le=100.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=_LARGEST)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0.0, le=100.0)
    logit_bias: LogitBias | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)

    stop: Stop | Annotated[list[Stop], Field(max_length=_MOST_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=_MOST_BIASES)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False

    response_format: ResponseFormat | None = None
    use_beam_search: Unserved = None
    length_penalty: Unserved = None
    early_stopping: Unserved = None
    prompt_logprobs: Unserved = None
    allowed_token_ids: Unserved = None
    bad_words: Unserved = None
    truncate_prompt_tokens: Unserved = None
    guided_json: Unserved = None
    guided_regex: Unserved = None
    guided_choice: Unserved = None
    guided_grammar: Unserved = None
    structured_outputs: Unserved = None
    logits_processors: Unserved = None
    return_tokens_as_token_ids: Unserved = None
    kv_transfer_params: Unserved = None
    vllm_xargs: Unserved = None
    request_id: Unserved = None
    cache_salt: Unserved = None
    spaces_between_special_tokens: Unserved = None
    priority: Literal[0] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def biases(self) -> Mapping[int, float]:
        """`logit_bias` by token id."""
        return {int(token): bias for token, bias in (self.logit_bias or {}).items()}


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    best_of: int | None = Field(None, ge=1, le=_LARGEST)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=_LARGEST)
    suffix: Unserved = None
    prompt_embeds: Unserved = None
    add_special_tokens: bool = True


class TextPart(Body):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


def _no_text(value: str) -> str:
    if value == "text":
        raise PydanticCustomError("text_part", "a text part holds `type` and `text`, a string")
    return value


class OtherPart(BaseModel):
    """A part of a message that is no text; refused by its type."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    type: Annotated[str, AfterValidator(_no_text)]


class Message(Body):
    """One message of a chat."""

    role: str = Field(min_length=1, max_length=64)
    content: str | list[TextPart | OtherPart] | None = None
    name: Label = None
    refusal: Unserved = None
    tool_calls: Unserved = None
    tool_call_id: Unserved = None
    function_call: Unserved = None
    audio: Unserved = None
    annotations: Unserved = None
    reasoning: Unserved = None
    reasoning_content: Unserved = None


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, le=_LARGEST)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=_LARGEST)
    echo: Unserved = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: Unserved = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=32)
    documents: Unserved = None

    tools: Unserved = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: Unserved = None
    functions: Unserved = None
    function_call: Literal["none"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: Unserved = None
    prediction: Unserved = None
    reasoning_effort: Unserved = None
    include_reasoning: Unserved = None
    thinking_token_budget: Unserved = None
    verbosity: Unserved = None
    web_search_options: Unserved = None
    moderation: Unserved = None
    mm_processor_kwargs: Unserved = None
    metadata: Unserved = None
    store: Unserved = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Label = None
    prompt_cache_key: Label = None
    prompt_cache_retention: Unserved = None


class EmbeddingBody(Body):
    """`POST /v1/embeddings`."""

    model: str | None = Field(None, max_length=LONGEST_NAME)
    input: str | list[str] | list[TokenId] | list[list[TokenId]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=_LARGEST)
    user: Label = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Unserved = None
    priority: Literal[0] | None = None
