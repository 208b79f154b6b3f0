"""What `inspect` tells, as documents."""

from __future__ import annotations

from typing import Literal

from ..adapters.contents import ModuleContent
from ..adapters.describe import AdapterSummary
from ..core.report import ReportPart
from ..linear.checkpoint.describe import QuantSummary

SCHEMA_VERSION = 1


class LinearSummary(ReportPart):
    """One linear, or one projection of a layer's experts, of an unquantised model.

    Attributes:
        name: in the model.
        shape: (N, K), of each expert.
        left: why wrapping leaves it as it is; None where it does not.
        experts: how many a projection has; 0 for a linear of its own.
    """

    name: str
    shape: tuple[int, int]
    left: str | None
    experts: int = 0


class ModelReport(ReportPart):
    """What `inspect` tells of a model's folder.

    Attributes:
        schema_version: of this document.
        kind: "model".
        folder: that was inspected.
        architecture: the model class.
        dtype: of what is not quantised; None where neither config nor headers say.
        parameters: of the model; shared ones count once.
        files: names of the files that hold its weights.
        nbytes: of these files.
        quantization: None where no metadata speaks of any.
        linears: of a model that is not quantised.
        problem: why it cannot be loaded; None where nothing speaks against it.
    """

    schema_version: int = SCHEMA_VERSION
    kind: Literal["model"] = "model"
    folder: str
    architecture: str
    dtype: str | None
    parameters: int
    files: tuple[str, ...]
    nbytes: int
    quantization: QuantSummary | None
    linears: tuple[LinearSummary, ...]
    problem: str | None


class FitReport(ReportPart):
    """An adapter on one model.

    Attributes:
        folder: of the model.
        architecture: of the model.
        linears_of_model: how many linears it has.
        modules: what the adapter holds for each module of it; empty if it does not fit.
        raw: names of the linears that a batch with this adapter reads raw; empty if it does not
            fit.
        digest: of the adapter on this model; None where it hangs on the weights as they are
            served.
        max_lora_rank: that slots are sized for.
        slot_nbytes: of one slot in all that the adapter has parts of; None where the digest is, the
            model's dtype is unknown or the adapter does not fit.
        notes: what a listing says.
        problem: why it cannot be loaded there; None where it can.
    """

    folder: str
    architecture: str
    linears_of_model: int
    modules: tuple[ModuleContent, ...]
    raw: tuple[str, ...]
    digest: str | None
    max_lora_rank: int
    slot_nbytes: int | None
    notes: tuple[str, ...]
    problem: str | None


class AdapterFileReport(ReportPart):
    """What `inspect` tells of an adapter.

    Attributes:
        schema_version: of this document.
        kind: "adapter".
        source: that was inspected, without passwords and tokens.
        adapter: what it holds.
        on: what it is on a model; None where none was named.
    """

    schema_version: int = SCHEMA_VERSION
    kind: Literal["adapter"] = "adapter"
    source: str
    adapter: AdapterSummary
    on: FitReport | None

    @property
    def problem(self) -> str | None:
        """Why it cannot be loaded: on the model that was named, or on any."""
        return self.adapter.problem if self.on is None else self.on.problem
