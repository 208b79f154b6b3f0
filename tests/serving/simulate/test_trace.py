from __future__ import annotations

import json

import numpy as np
import pytest

from branchline.core.errors import ConfigError
from branchline.serving.simulate.trace import TracedRequest, read_trace


def test_a_popularity_is_drawn_the_same_each_time():
    text = "zipf:1.0,requests=5000,prompt=50,output=20,seed=3"
    trace = read_trace(text, 100)
    assert len(trace) == 5000
    assert trace.clients == 16
    assert list(trace) == list(read_trace(text, 100))
    counts = np.bincount(trace.adapters)
    # Of weights 1, 1/2, 1/3 ...
    assert counts[0] / counts[1] == pytest.approx(2.0, rel=0.2)
    assert trace.prompts.mean() == pytest.approx(50, rel=0.05)
    assert trace.outputs.mean() == pytest.approx(20, rel=0.05)
    assert trace.prompts.min() >= 1


def test_a_rate_makes_times_and_base_requests_have_no_adapter():
    trace = read_trace("uniform,requests=4000,rate=50,base=0.25", 10)
    assert trace.clients is None
    assert trace.times[-1] == pytest.approx(4000 / 50, rel=0.1)
    assert (np.diff(trace.times) >= 0).all()
    assert (trace.adapters < 0).mean() == pytest.approx(0.25, abs=0.03)


def test_without_adapters_all_requests_are_the_bases():
    assert {r.adapter for r in read_trace("uniform,requests=9", 0)} == {None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zipf:x", "no exponent"),
        ("zipf:-1", "no exponent"),
        ("zipf:1.0,speed=3", "no option"),
        ("zipf:1.0,requests", "no option"),
        ("uniform,requests=many", "is no requests"),
        ("uniform,requests=0", "out of range"),
        ("uniform,base=2", "out of range"),
        ("uniform,clients=0", "out of range"),
        ("uniform,rate=nan", "out of range"),
        ("uniform,rate=inf", "out of range"),
        ("uniform,requests=99999999999999", "out of range"),
        ("nowhere.jsonl", "cannot be read"),
    ],
)
def test_what_is_no_trace(text, said):
    with pytest.raises(ConfigError, match=said):
        read_trace(text, 4)


def write(tmp_path, *lines: object) -> str:
    path = tmp_path / "trace.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts))
    return str(path)


def test_a_file_of_requests(tmp_path):
    entries = [
        {"time": 0.5, "adapter": "sql", "prompt": 10, "output": 3},
        "",
        {"time": 0.75, "adapter": None, "prompt": 5, "output": 1},
    ]
    trace = read_trace(write(tmp_path, *entries), 0)
    assert list(trace) == [TracedRequest(0.5, "sql", 10, 3), TracedRequest(0.75, None, 5, 1)]
    assert trace.clients is None
    untimed = read_trace(write(tmp_path, {"prompt": 5, "output": 1}), 0)
    assert untimed.clients is not None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1 is no request"),
        ("[]", "line 1 is no request"),
        ({"prompt": 5}, "line 1 is no request"),
        ({"prompt": "x", "output": 1}, "line 1 is no request"),
        ({"prompt": 0, "output": 1}, "line 1 is no request"),
        ({"prompt": 1, "output": 1, "adapter": 7}, "line 1 is no request"),
        ({"prompt": 1, "output": 1, "time": -1}, "line 1 is no request"),
        ('{"prompt": 1, "output": 1, "time": NaN}', "line 1 is no request"),
        ('{"prompt": 1e999, "output": 1}', "line 1 is no request"),
        ({"prompt": 5.9, "output": 1}, "line 1 is no request"),
        ("", "holds no requests"),
    ],
)
def test_a_line_that_is_no_request(tmp_path, line, said):
    with pytest.raises(ConfigError, match=said):
        read_trace(write(tmp_path, line), 0)


def test_requests_out_of_order_are_refused(tmp_path):
    lines = [{"time": 2, "prompt": 1, "output": 1}, {"time": 1, "prompt": 1, "output": 1}]
    with pytest.raises(ConfigError, match="not in order"):
        read_trace(write(tmp_path, *lines), 0)
