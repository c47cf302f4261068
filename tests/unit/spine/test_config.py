"""Configuration: parsing, precedence, refusals, and where each value is from."""

from __future__ import annotations

import dataclasses
import logging
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bytesched.config import FIELDS, Config, ConfigFields, variable
from bytesched.environment import RankView, child_environment, rank_view, seen_variables
from bytesched.errors import ConfigError
from bytesched.values import parse_size


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_defaults_are_valid_and_known_as_defaults() -> None:
    config = Config.load()
    assert config == Config()
    assert {origin for _, _, origin in config.explain()} == {"default"}


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [
        ("512KiB", 512 * 1024),
        *((written, 1_000_000) for written in ("1MB", "1e6", "1_000_000")),
        *((written, 4 << 20) for written in ("4MiB", "4 mib")),
        ("0.5 GiB", 1 << 29),
        ("16B", 16),
        (4096, 4096),
        (4e6, 4_000_000),
        *((written, 0) for written in ("0", 0, "auto")),
    ],
)
def test_size(written: object, size_bytes: int) -> None:
    size = parse_size(written)
    assert size == size_bytes
    assert type(size) is int


@pytest.mark.parametrize(
    ("written", "why"),
    [
        *((written, "negative") for written in (-1, "-4MiB")),
        (1, "under 16 bytes"),
        ("2TiB", "unit 'tib'"),
        ("4M", "unit 'm'"),
        *((written, "1 TiB") for written in ("2048GiB", 1 << 41)),
        pytest.param(10**400, "1 TiB", id="beyond-float"),
        *((written, "no whole number") for written in ("0.3KiB", 1.5)),
        *((written, "finite") for written in (math.nan, math.inf, "1e999")),
        *((w, "not a size") for w in ("4 MiB/s", "1.2.3MB", "nan", "", True, None, [1])),
    ],
)
def test_size_is_refused_with_value_and_reason(written: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        Config.load(partition_bytes=written)
    assert f"partition_bytes = {written!r}"[:60] in str(caught.value)


@given(st.integers(16, 1 << 40))
def test_size_survives_its_text(size_bytes: int) -> None:
    assert parse_size(str(size_bytes)) == size_bytes
    assert parse_size(f"{size_bytes} B") == size_bytes


@pytest.mark.parametrize(
    ("field", "written", "value"),
    [
        *(("enabled", written, True) for written in ("1", "true", "Yes", " on ", True)),
        *(("enabled", written, False) for written in ("0", "false", "No", "off", False)),
        ("find_unused_parameters", "auto", None),
        ("find_unused_parameters", "1", True),
        ("split", "On", "on"),
        ("log_level", "debug", "DEBUG"),
        ("compression", "BF16", "bf16"),
        ("timeline", Path("/runs"), "/runs"),
    ],
)
def test_a_value_is_brought_to_its_type(field: str, written: object, value: object) -> None:
    found = getattr(Config.load(**{field: written}), field)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("field", "written", "why"),
    [
        *(("timeout_s", given, "seconds") for given in (0, -1, math.nan, math.inf, 1e12, "soon")),
        *(("timeout_s", given, "seconds") for given in (True, None)),
        ("enabled", "maybe", "not a switch"),
        ("compression", "int4", "none of none, bf16, fp16"),
        ("log_level", "LOUD", "none of DEBUG"),
        ("policy", " ", "empty"),
        ("timeline", 3, "not a path"),
    ],
)
def test_a_value_is_refused_with_its_reason(field: str, written: object, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} = {written!r} .*{why}"):
        Config.load(**{field: written})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("partition_size", "'partition_size'.*did you mean partition_bytes"),
        ("zzz", "known: enabled, policy"),
    ],
)
def test_an_unknown_keyword_names_the_nearest_or_lists_all(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Config.load(**{name: 4})


def test_precedence(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty_folder / "bytesched.toml").write_text(
        'partition_bytes = "1MiB"\ncredit_bytes = 1048576\ntimeout_s = 10\nenabled = true\n'
    )
    monkeypatch.setenv("BYTESCHED_CREDIT_BYTES", "4MiB")
    monkeypatch.setenv("BYTESCHED_TIMEOUT_S", "20")
    rows = {name: (v, origin) for name, v, origin in Config.load(timeout_s=30).explain()}
    assert rows["partition_bytes"] == (1 << 20, "file bytesched.toml")
    assert rows["credit_bytes"] == (4 << 20, "environment BYTESCHED_CREDIT_BYTES")
    assert rows["timeout_s"] == (30.0, "code")
    assert rows["enabled"] == (True, "file bytesched.toml")
    assert rows["policy"] == ("priority", "default")


def test_a_hidden_setting_is_said_on_rank_0_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bytesched")
    monkeypatch.setenv("BYTESCHED_TIMEOUT_S", "20")
    Config.load(timeout_s=20)
    assert not caplog.records
    Config.load(timeout_s=30)
    assert "timeout_s = 30.0 overrides 20.0 (environment BYTESCHED_TIMEOUT_S)" in caplog.text
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    Config.load(timeout_s=30)
    assert not caplog.records


def test_unknown_variable_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTESCHED_PARTITON_BYTES", "4MiB")
    with pytest.raises(
        ConfigError,
        match=r"BYTESCHED_PARTITON_BYTES = '4MiB' .*did you mean BYTESCHED_PARTITION_BYTES",
    ):
        Config.load()


@pytest.mark.parametrize(
    ("file", "field", "text", "said"),
    [
        (
            *("partition_bytes = 4096", "credit_bytes", "1KiB"),
            "credit_bytes = 1024 is below partition_bytes = 4096.*raise credit_bytes to .* 4096",
        ),
        ("split = 'off'", "shard", "1", "shard = True and split = 'off'"),
        ("shard = true", "tune", "on", "shard = True and tune = True"),
    ],
)
def test_values_that_exclude_each_other_are_refused_with_where_each_stood(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, file: str, field: str, text: str, said: str
) -> None:
    (empty_folder / "bytesched.toml").write_text(file)
    monkeypatch.setenv(variable(field), text)
    with pytest.raises(ConfigError, match=said) as caught:
        Config.load()
    assert f"{field} is from environment {variable(field)}" in str(caught.value)
    assert f"{file.split(' ')[0]} is from file bytesched.toml" in str(caught.value)


_JUNK = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    *(st.lists(st.integers(), max_size=2), st.binary(max_size=4)),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def refusal(**fields: object) -> str:
    """Why the settings are refused; empty if they are not."""
    try:
        hash(Config.load(**fields))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("field", FIELDS)
@given(value=_JUNK)
@pytest.mark.one_in(4)
def test_any_value_is_taken_or_refused_with_its_name_and_where_it_stood(
    field: str, value: object
) -> None:
    why = refusal(**{field: value})
    assert not why or (f"{field} = " in why and "code" in why)


@pytest.mark.parametrize("field", FIELDS)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20))
@pytest.mark.one_in(4)
def test_any_variable_is_taken_or_refused_with_its_name(field: str, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable(field), text)
        why = refusal()
    assert not why or (f"{field} = " in why and f"environment {variable(field)}" in why)


def test_what_is_overridden_is_checked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTESCHED_TIMEOUT_S", "never")
    with pytest.raises(ConfigError, match="BYTESCHED_TIMEOUT_S"):
        Config.load(timeout_s=5)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("partition_bytes = ", "no valid TOML"),
        ("partitions = 4", r"'partitions' \(file bytesched.toml\); did you mean partition_bytes"),
        ('timeout_s = "x"', r"timeout_s = 'x' \(file bytesched.toml\)"),
        ("[table]\na = 1", "'table'"),
        ("timeout_s = " + "9" * 5000, "no valid TOML: .*5000 digits"),
        ("policy = " + "[" * 100_000, "no valid TOML: nested too deeply"),
        ("policy = 'a\0b'", "no valid TOML"),
        (f"partition_bytes = '{'x' * 3000}'", r"'x{79}\.\.\. \(3002 characters\)"),
        (f"{'x' * 3000} = 1", r"no field 'x{79}\.\.\. \(3002 characters\)"),
        (f"timeout_s = 0x{'f' * 5000}", "timeout_s = a number with thousands of digits"),
    ],
)
def test_bad_file_is_refused(empty_folder: Path, text: str, why: str) -> None:
    (empty_folder / "bytesched.toml").write_text(text)
    with pytest.raises(ConfigError, match=why):
        Config.load()


def test_a_file_that_cannot_be_read_is_refused(empty_folder: Path) -> None:
    file = empty_folder / "bytesched.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytesched.toml cannot be read"):
        Config.load()
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match=r"bytesched.toml cannot be read"):
        Config.load()


def test_config_is_frozen_comparable_and_picklable() -> None:
    config = Config.load(partition_bytes="4MiB")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.policy = "fifo"  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(config))  # noqa: S301
    assert copy == config
    assert copy.explain() == config.explain()
    assert dataclasses.replace(config, policy="fifo").partition_bytes == 4 << 20


def test_waits_end_as_others_do_unless_something_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.load(policy="fifo").waiting(60.0)
    assert (config.timeout_s, config.origin("timeout_s")) == (60.0, "default")
    assert (config.policy, config.origin("policy")) == ("fifo", "code")
    assert Config.load(timeout_s=1800).waiting(60.0).timeout_s == 1800
    monkeypatch.setenv("BYTESCHED_TIMEOUT_S", "10")
    assert Config.load().waiting(60.0).timeout_s == 10


def test_keyword_types_and_fields_agree() -> None:
    assert list(ConfigFields.__annotations__) == list(FIELDS)
    assert [variable(name) for name in FIELDS][:2] == ["BYTESCHED_ENABLED", "BYTESCHED_POLICY"]


@pytest.mark.parametrize(
    ("variables", "view"),
    [
        ({}, RankView("none", 0, 0, 1)),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, RankView("torchrun", 3, 1, 4)),
        ({"RANK": "3"}, RankView("none", 0, 0, 1)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "8"}, RankView("slurm", 2, -1, 8)),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "RANK": "x"},
            RankView("mpirun", 1, -1, 2),
        ),
    ],
)
def test_rank_view(
    variables: dict[str, str], view: RankView, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert rank_view() == view


def test_child_environment_adds_and_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTESCHED_POLICY", "fifo")
    child = child_environment({"BYTESCHED_POLICY": None, "RANK": "1", "ABSENT": None})
    assert "BYTESCHED_POLICY" not in child
    assert child["RANK"] == "1"
    assert "PATH" in child
    assert seen_variables()["BYTESCHED_POLICY"] == "fifo"
