"""`branchline simulate`: what a fleet would do, from shapes, a device's costs and a trace."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ..core.devices import DEVICE_KINDS
from ..serving.config import WrapConfig
from ..serving.serve_config import EngineConfig
from .options import help_of, with_settings
from .output import console, note, print_json, results_only_on_stdout
from .session import JsonOption

_SLOTS = (4, 8, 16, 32)
#: Given by flags of the command's own.
_OWN = ("policy", "max_loras", "max_lora_rank", "lora_slots")
#: What no simulation hangs on.
_USELESS = (
    "max_model_len", "enable_prefix_caching", "max_cpu_loras", "max_cpu_lora_bytes",
    "allowed_roots", "max_adapter_bytes", "allow_base_mismatch", "lora_dtype", "percentile",
)  # fmt: skip

ModelOption = Annotated[
    Path, typer.Option("--model", metavar="MODEL", help="Folder of a transformers checkpoint.")
]
AdaptersOption = Annotated[
    int, typer.Option(min=0, max=10**7, help="How many adapters a drawn trace chooses from.")
]
TraceOption = Annotated[
    str,
    typer.Option(
        metavar="TRACE",
        help="A .jsonl file of requests, or one that is drawn: zipf:ALPHA or uniform, then "
        "requests=, rate= (a second) or clients=, prompt=, output= (mean tokens), base= (share "
        "without an adapter), seed=, with commas between.",
    ),
]
KindOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TARGETS:RANK:SHARE",
        help="What some of the adapters hold, such as q_proj,v_proj:16:0.7; repeatable. Unset: "
        "all linears, rank 16.",
    ),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(help=f"{help_of(WrapConfig.model_fields['policy'])} Repeatable."),
]
SlotsOption = Annotated[
    list[int] | None,
    typer.Option(min=1, help=f"Slots of each replica; repeatable. Unset: {_SLOTS}."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        metavar="KIND", help=f"Of the replicas ({', '.join(DEVICE_KINDS)}); unset: this machine."
    ),
]
ReplicasOption = Annotated[
    int, typer.Option(min=1, max=10**6, help="How many replicas share the trace.")
]
RoutingOption = Annotated[
    str, typer.Option(help="affinity (an adapter's requests to one replica) or spread (in turn).")
]
SampleOption = Annotated[
    int, typer.Option(min=1, help="How many replicas are simulated; they stand for all.")
]


@with_settings(EngineConfig, panel="Engine", without=(*_OWN, *_USELESS))
def simulate(
    *,
    model: ModelOption,
    adapters: AdaptersOption = 100,
    trace: TraceOption = "zipf:1.0",
    kind: KindOption = None,
    policy: PolicyOption = None,
    slots: SlotsOption = None,
    device: DeviceOption = None,
    replicas: ReplicasOption = 1,
    routing: RoutingOption = "affinity",
    sample: SampleOption = 16,
    json: JsonOption = False,
    settings: EngineConfig,
) -> None:
    """Predict slot hits, stalls and the throughput that adapters cost, for every policy.

    The engine's own scheduler runs on a clock: forwards take what the device's cost model says.
    No weights are loaded.
    """
    # transformers comes with it.
    from ..core.platform import detect_platform
    from ..policies.cost import cost_model_for, cost_model_of
    from ..policies.policy import make_policy
    from ..serving.hollow.audit import HollowModel
    from ..serving.simulate.clock import AdapterKind, ModelClock
    from ..serving.simulate.fleet import Routing, Simulation
    from ..serving.simulate.trace import read_trace

    if routing not in tuple(Routing):
        raise typer.BadParameter(f"{routing!r} is none of {', '.join(Routing)}")
    costs = cost_model_of(detect_platform()) if device is None else cost_model_for(device)
    kinds = tuple(map(AdapterKind.parse, kind or ["all"]))
    policies = tuple(map(make_policy, policy or ["static", "dynamic", "dual", "absorbed"]))
    read = read_trace(trace, adapters)
    note(f"reading {model}")
    with results_only_on_stdout(), ExitStack() as undo:
        hollow = HollowModel.of(model, settings, costs.device.platform, undo)
        clocks = {one: ModelClock(hollow, costs, one, kinds) for one in policies}
        asked = Simulation(
            read,
            kinds,
            clocks,
            settings,
            tuple(slots or _SLOTS),
            replicas,
            Routing(routing),
            sample,
            next(iter(clocks.values())).blocks(settings),
        )
        described = costs.device
        report = asked.run(
            model=str(model), device=described.kind, measured=described.measured, trace=trace
        )
    if json:
        print_json(report.model_dump_json(indent=2))
    else:
        report.render(console())
