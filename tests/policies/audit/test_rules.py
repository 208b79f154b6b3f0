from __future__ import annotations

import pytest

from branchline import wrap
from branchline.core.errors import ConfigError
from branchline.policies.audit.report import AuditReport, Problem
from branchline.policies.audit.rules import Rule, check_rules
from tests import models


def found(text: str, report: AuditReport) -> list[str]:
    fired = check_rules([Rule.parse(text)], report)
    assert {one.rule for one in fired} <= {text}
    return [one.found for one in fired]


@pytest.mark.parametrize(
    ("fires", "holds"),
    [
        # Six sites; sql takes the norms before attention and the activations, four of them.
        ("unfused>5", "unfused>6"),
        ("unfused>=6", "unfused>=7"),
        ("unfused>99%", "unfused>100%"),
        ("adapter:sql unfused>3", "adapter:sql unfused>4"),
        ("adapter:sql unfused>66%", "adapter:sql unfused>67%"),
        ("adapter:sql policy:dynamic unfused>0", "adapter:sql policy:absorbed unfused>0"),
        ("policy:dual dual>0", "policy:dual absorbed>0"),
        ("policy:absorbed absorbed > 5", "policy:dynamic absorbed > 0"),
        ("bytes>3000", "bytes>1e6"),
        ("fused<50%", "fused<0%"),
        ("emulated<=0", "emulated>0"),
        ('adapter:"sql" unfused>3', 'adapter:"sql" policy:dynamic unfused<=3'),
        ("bytes>100%", "adapter:sql policy:absorbed bytes>100%"),
        ("reason:adapter", "reason:hook"),
        ("producer:native", "producer:triton"),
        ("kernel:float", "kernel:emulated"),
    ],
)
def test_rules_fire_where_they_are_true(report, fires, holds):
    assert found(fires, report)
    assert not found(holds, report)


def test_what_is_found_is_named(report):
    (text,) = found("adapter:tone policy:dynamic unfused>0", report)
    assert text == "2 of 6 sites are unfused in batches of tone under policy dynamic"
    (text,) = found("adapter:tone policy:dynamic bytes>0", report)
    assert text.startswith("adapter tone moves ")
    assert "under policy dynamic" in text
    texts = found("adapter:tone reason:adapter", report)
    (text,) = texts
    assert "model.layers.*.input_layernorm" in text
    assert "adapter 'tone'" in text
    assert found("kernel:float", report) == ["kernel float serves 1 linears"]


def test_mismatches_and_problems_fire(report):
    assert not found("mismatch", report)
    assert not found("problem", report)
    served = wrap(models.build("llama"))
    served.model.model.layers[0].input_layernorm.variance_epsilon = 1.0
    served(models.token_ids(1, 3))
    changed = served.audit()
    assert any("input_layernorm" in text for text in found("mismatch", changed))
    problem = Problem(part="adapter 'x'", reason="is gone", remedy="find it")
    assert found("problem", changed.model_copy(update={"problems": (problem,)})) == [
        "adapter 'x': is gone"
    ]


def test_an_unknown_consumer_has_its_reason():
    class Read(torch_model()):
        def forward(self, x):
            hidden = self.norm(x)
            return self.q(hidden) + hidden.sum() * 0

    served = wrap(Read(), quant="fp8-dynamic", example={"x": example()})
    report = served.audit()
    assert found("reason:unknown-consumer", report)
    assert not found("reason:adapter", report)


def torch_model():
    import torch
    from torch import nn

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(32, dtype=torch.bfloat16)
            self.q = nn.Linear(32, 32, dtype=torch.bfloat16)
            self.k = nn.Linear(32, 32, dtype=torch.bfloat16)

    return Normed


def example():
    import torch

    return torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_a_hook_has_its_reason():
    class Plain(torch_model()):
        def forward(self, x):
            return self.k(self.q(self.norm(x)))

    model = Plain()
    served = wrap(model, example={"x": example()})
    assert not found("reason:hook", served.audit())
    handle = model.q.register_forward_pre_hook(lambda module, args: None)
    assert found("reason:hook", served.audit())
    handle.remove()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no condition"),
        ("unfused", "'unfused' is no condition"),
        ("unfused>", "'unfused>' is no condition"),
        ("unfused>ten", "'unfused>ten' is no condition"),
        ("unfused=3", "'unfused=3' is no condition"),
        ("fuzed>3", "'fuzed' cannot be counted"),
        ("reason:because", "'because' is no reason: planned, adapter"),
        ("adapter:sql", "is no condition"),
        ("adapter:a adapter:b unfused>1", "names adapters twice"),
        ("adapter:sql kernel:emulated", "kernels are the same"),
        ("adapter:sql mismatch", "mismatch is the same for all"),
        ("kernel:nonsense", "'nonsense' is no kernel"),
        ("producer:typo", "'typo' is no producer"),
        ("unfused>\N{DEVANAGARI DIGIT ONE}", "is no condition"),
        ("mismatch!", "is no condition"),
    ],
)
def test_what_is_no_rule_is_refused_with_the_part(text, said):
    with pytest.raises(ConfigError, match=r"--fail-on") as caught:
        Rule.parse(text)
    assert said in str(caught.value)


def test_rules_about_what_was_not_audited_are_refused(report):
    for text, said in (
        ("adapter:gone unfused>1", "adapter 'gone' was not audited alone"),
        ("adapter:gone bytes>1", "adapter 'gone' was not audited alone"),
        ("policy:static unfused>1", "policy 'static' was not audited"),
    ):
        with pytest.raises(ConfigError, match=said):
            found(text, report)
