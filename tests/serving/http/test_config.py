"""What a server is started with: from flags, environment and file, in this order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from branchline.core.errors import ConfigError
from branchline.serving.config_layers import layered
from branchline.serving.http.start import base_names
from branchline.serving.serve_config import EngineConfig, LoraModule, ServeConfig


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch):
    for name in ServeConfig.model_fields:
        monkeypatch.delenv(f"BRANCHLINE_{name.upper()}", raising=False)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", raising=False)


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        file = tmp_path / "serve.yaml"
        file.write_text(text)
        return file

    return write


def keys(config: ServeConfig) -> tuple[str, ...]:
    return tuple(key.get_secret_value() for key in config.api_key)


def test_each_place_goes_before_the_next(write, monkeypatch):
    file = write("port: 1\nmax-loras: 2\nmax_num_seqs: 3\n")
    monkeypatch.setenv("BRANCHLINE_PORT", "10")
    monkeypatch.setenv("BRANCHLINE_MAX_LORAS", "20")
    found = layered(ServeConfig, {"port": 100}, file)
    assert (found.port, found.max_loras, found.max_num_seqs) == (100, 20, 3)
    assert found.host == ServeConfig().host
    assert found.model_fields_set == {"port", "max_loras", "max_num_seqs"}


def test_a_value_of_the_environment_is_one_entry_or_a_json_list(monkeypatch):
    monkeypatch.setenv("BRANCHLINE_API_KEY", "one, still one")
    monkeypatch.setenv("BRANCHLINE_ALLOWED_ROOTS", '["/a", "/b"]')
    monkeypatch.setenv("BRANCHLINE_LORA_MODULES", '{"name": "sql", "path": "x"}')
    found = layered(ServeConfig, {}, None)
    assert keys(found) == ("one, still one",)
    assert found.allowed_roots == ("/a", "/b")
    assert found.modules == (LoraModule(name="sql", path="x"),)


def test_vllm_s_variables_are_read_behind_our_own(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    found = layered(ServeConfig, {"allowed_roots": ["/a"]}, None)
    assert keys(found) == ("theirs",)
    assert found.allow_runtime_lora_updating
    monkeypatch.setenv("BRANCHLINE_API_KEY", "ours")
    monkeypatch.setenv("BRANCHLINE_ALLOW_RUNTIME_LORA_UPDATING", "0")
    found = layered(ServeConfig, {}, None)
    assert keys(found) == ("ours",)
    assert not found.allow_runtime_lora_updating


def test_modules_in_a_file_may_be_a_mapping_or_a_list(write):
    mapping = layered(ServeConfig, {}, write("lora_modules:\n  sql: a\n  tone: b\n"))
    listed = layered(
        ServeConfig, {}, write("lora-modules:\n  - sql=a\n  - {name: tone, path: b}\n")
    )
    wanted = (LoraModule(name="sql", path="a"), LoraModule(name="tone", path="b"))
    assert mapping.modules == listed.modules == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 8000\n", "unknown setting 'prot'"),
        ("port: 1\nport: 2\n", "'port' is there twice"),
        ("max-loras: 1\nmax_loras: 2\n", "twice the setting 'max_loras'"),
        ("- port\n", "no mapping"),
        ("port: [\n", "no YAML"),
        ("port: !!python/name:os.system\n", "no YAML"),
        ("port: 70000\n", "serve.yaml: port 70000"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(write, text, said):
    with pytest.raises(ConfigError) as raised:
        layered(ServeConfig, {}, write(text))
    assert said in str(raised.value)


def test_a_file_that_is_not_there_or_too_long_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nix\.yaml.*cannot be read"):
        layered(ServeConfig, {}, tmp_path / "nix.yaml")
    (tmp_path / "long.yaml").write_bytes(b"# " + b"x" * 2**20)
    with pytest.raises(ConfigError, match="longer than"):
        layered(ServeConfig, {}, tmp_path / "long.yaml")


def test_an_error_tells_where_the_value_comes_from_and_no_secret(write, monkeypatch):
    with pytest.raises(ConfigError, match=r"^--port 70000: "):
        layered(ServeConfig, {"port": 70000}, None)
    monkeypatch.setenv("BRANCHLINE_PORT", "many")
    with pytest.raises(ConfigError, match=r"^BRANCHLINE_PORT 'many': "):
        layered(ServeConfig, {}, None)
    monkeypatch.delenv("BRANCHLINE_PORT")
    with pytest.raises(ConfigError) as raised:
        layered(ServeConfig, {}, write("api_key: {secret: hunter2}\n"))
    assert "hunter2" not in str(raised.value)
    monkeypatch.setenv("BRANCHLINE_API_KEY", '["hunter2",')
    with pytest.raises(ConfigError) as raised:
        layered(ServeConfig, {}, None)
    assert "hunter2" not in str(raised.value)


def test_an_empty_key_is_refused_rather_than_no_key(monkeypatch):
    for variable in ("VLLM_API_KEY", "BRANCHLINE_API_KEY"):
        monkeypatch.setenv(variable, "")
        with pytest.raises(ConfigError, match=f"{variable}.*a key is empty"):
            layered(ServeConfig, {}, None)


def test_keys_are_never_shown():
    config = ServeConfig.checked(api_key="hunter2", admin_key=("hunter3",))
    assert "hunter" not in repr(config)
    assert "hunter" not in str(config.model_dump())
    assert "hunter" not in config.model_dump_json()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"allow_runtime_lora_updating": True}, "allowed_roots"),
        ({"max_concurrency_per_key": 2}, "api_key"),
        ({"lora_modules": ("sql=a", "sql=b")}, "sql twice"),
        ({"lora_modules": "sql"}, "NAME=SOURCE"),
        ({"lora_modules": '{"name": "sql"}'}, "path Field required"),
        ({"lora_modules": '{"name": "sql", "path": "a", "rank": 3}'}, "rank"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        ServeConfig.checked(**settings)


def test_names_of_the_base_model(tmp_path):
    folder = tmp_path / "llama"
    assert base_names(ServeConfig(), folder) == ("llama",)
    named = ServeConfig(served_model_name=("a", "b"), lora_modules=("sql=x",))
    assert base_names(named, folder) == ("a", "b")
    with pytest.raises(ConfigError, match="'a': has the base model's name"):
        base_names(ServeConfig(served_model_name=("a",), lora_modules=("a=x",)), folder)
    of_another = '{"name": "sql", "path": "x", "base_model_name": "b"}'
    assert base_names(ServeConfig(served_model_name=("a", "b"), lora_modules=(of_another,)), folder)
    with pytest.raises(ConfigError, match="for 'b', but the base model is 'llama'"):
        base_names(ServeConfig(lora_modules=(of_another,)), folder)


def test_every_field_says_what_it_is():
    for name, field in ServeConfig.model_fields.items():
        assert field.description, name
    assert set(EngineConfig.model_fields) < set(ServeConfig.model_fields)


def test_the_file_that_the_documentation_shows_is_one(write):
    text = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found = layered(ServeConfig, {}, write(shown))
    assert [module.name for module in found.modules] == ["sql", "tone"]
    assert found.allow_runtime_lora_updating
    assert found.max_loras == 16
