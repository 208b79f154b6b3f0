"""One answer of what every replica answered."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from .asgi import Head, Reply
from .replica import Answered


def merged_listing(answers: Sequence[Answered]) -> Reply:
    """`/v1/adapters` of all: one line for each adapter and replica, named by `replica`.

    Args:
        answers: at least one; all succeeded.
    """
    bodies = {answer.replica: json.loads(answer.reply.body) for answer in answers}
    first = next(iter(bodies.values()))
    lines = {
        field: [
            {**line, "replica": replica} for replica, body in bodies.items() for line in body[field]
        ]
        for field in ("data", "draining")
    }
    return _json({**first, **lines, "replicas": list(bodies)})


def merged_readiness(answers: Sequence[Answered]) -> Reply:
    """`/ready` of all: what the first says, and how many there are.

    Args:
        answers: at least one; all succeeded.
    """
    return _json({**json.loads(answers[0].reply.body), "replicas": len(answers)})


def _json(body: Mapping[str, object]) -> Reply:
    content = json.dumps(body, ensure_ascii=False).encode()
    return Reply(Head(200, ((b"content-type", b"application/json"),)), content)


def merged_metrics(answers: Sequence[Answered]) -> Reply:
    """`/metrics` of all: every sample with a label `replica`, and how many replicas there are.

    Args:
        answers: at least one; all succeeded.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for answer in answers:
        comments: list[str] = []
        samples: list[str] = []
        known = False
        for line in answer.reply.body.decode().splitlines():
            if line.startswith("# HELP "):
                comments, samples = families.setdefault(line.split(" ")[2], ([], []))
                known = bool(comments)
            if line.startswith("# "):
                if not known:
                    comments.append(line)
            elif line:
                samples.append(_labelled(line, answer.replica))
    lines = [line for family in families.values() for part in family for line in part]
    lines += [
        "# HELP branchline_replicas Replicas that answered.",
        "# TYPE branchline_replicas gauge",
        f"branchline_replicas {len(answers)}",
    ]
    head = Head(200, ((b"content-type", CONTENT_TYPE_PLAIN_0_0_4.encode()),))
    return Reply(head, ("\n".join(lines) + "\n").encode())


def _labelled(sample: str, replica: str) -> str:
    """`name{a="b"} 1` with one label more; the ids of replicas are letters and digits."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f'{name}{{replica="{replica}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{replica="{replica}"}} {value}'
