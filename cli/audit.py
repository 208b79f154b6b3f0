"""`branchline audit`: which sites are fused, for which adapters, and why."""

from __future__ import annotations

from ..serving.config import WrapConfig
from .options import with_settings
from .output import console, print_json, results_only_on_stdout
from .session import AdapterOption, CalibrationOption, JsonOption, ModelArgument, Session


@with_settings(WrapConfig)
def audit(
    model: ModelArgument,
    *,
    adapter: AdapterOption = None,
    calibration: CalibrationOption = None,
    json: JsonOption = False,
    settings: WrapConfig,
) -> None:
    """Show for every site who reads its output, and its route for each set of adapters.

    The sets are: no adapter, each adapter alone, all of them together.
    """
    with results_only_on_stdout():
        report = Session(model, adapter or (), calibration, settings).serve().audit()
    if json:
        print_json(report.model_dump_json(indent=2))
    else:
        report.render(console())
