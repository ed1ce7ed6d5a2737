"""Lines that are no evidence close the gate: forged, from other specs, without a header, or contradictory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from conformance import ROOT
from megamoe.gate.evidence import checked
from megamoe.records.files import parse_records, read_records
from megamoe.records.lines import RecordError, Signature
from megamoe.records.provenance import digests_of, run_header
from megamoe.records.signing import distrusted, private_key, signed, trusted_keys
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection

CASE = "fmha:hd=64,t=1,s_k=128"
SPECS = load_specs()
OURS = {"specs": "s", "expected": "e", "code": "c"}
ERRORS = {f"{name}.{error}": 1e-3 for name in ("o", "lse") for error in ("rms", "row", "max", "bias")}
BARS = {f"{name}.bar": 2e-3 for name in ERRORS}
RECORD: dict[str, Any] = {
    "schema_version": 2, "run": "run-1", "kind": "record", "case": CASE, "op": "fmha", "backend": "ptx",
    "target": "sm_90a", "executor": "vm", "schedule": "eager", "status": "passed", "sentence": "",
    "metrics": {**ERRORS, **BARS, "o.cosine": 1.0, "lse.cosine": 1.0},
    "counters": {"instructions_control": 7, "minimum_bytes": 9, "useful_flops": 3}, "judge_host_seconds": 0.5,
    "program_sha256": "p" * 64, "input_sha256": {"q": "1", "k": "2", "v": "3"}, "bundle": None,
}  # fmt: skip
FIGURES: dict[str, Any] = {
    "schema_version": 2, "run": "run-1", "kind": "figures", "case": CASE, "op": "fmha", "backend": "ptx",
    "target": "sm_90a", "assembler": "ptxas", "program_sha256": "p" * 64, "kernels": {},
}  # fmt: skip
LAZY = {**RECORD, "schedule": "lazy"}
Line = dict[str, Any]


def _header(**changes: object) -> Line:
    made = json.loads(run_header(Selection(), 1).model_dump_json())
    return {**made, "run": "run-1", "digests": OURS, **changes}


def _findings(*lines: Line) -> list[str]:
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return [finding.sentence for finding in checked([parse_records(Path("r.jsonl"), data)], OURS, SPECS).findings]


def _metrics(**changes: float | None) -> Callable[[], list[Line]]:
    whole = {**RECORD["metrics"], **{name.replace("__", "."): value for name, value in changes.items()}}
    kept = {name: value for name, value in whole.items() if value is not None}
    return lambda: [_header(), {**RECORD, "metrics": kept}]


def _changed(**changes: object) -> Callable[[], list[Line]]:
    return lambda: [_header(), {**RECORD, **changes}]


FORGERIES: dict[str, tuple[Callable[[], list[Line]], str]] = {
    "no header": (lambda: [RECORD], "whose header is in no file"),
    "an older run under a newer header": (lambda: [_header(run="run-2"), RECORD], "whose header is in no file"),
    "two headers": (lambda: [_header(), _header(owed_rows=2), RECORD], "2 headers"),
    "weaker specs": (lambda: [_header(digests={**OURS, "specs": "x"}), RECORD], "other specs than those here"),
    "other excuses": (lambda: [_header(digests={**OURS, "expected": "x"}), RECORD], "other expected failures"),
    "no digest of specs": (lambda: [_header(digests={"code": "c"}), RECORD], "other specs than those here"),
    "an error of NaN": (_metrics(o__rms=float("nan")), "its o.rms is nan"),
    "a bar without end": (_metrics(o__rms__bar=float("inf")), "its o.rms.bar is inf"),
    "an error above its bar": (_metrics(o__max=5e-3), "the max error of o is 0.005, and its bar 0.002"),
    "a negative error": (_metrics(lse__row=-1.0), "the row error of lse is -1"),
    "an error left out": (_metrics(lse__row=None), "it has no row error of lse"),
    "a bar left out": (_metrics(lse__row__bar=None), "it has no row error of lse, or no bar"),
    "a cosine left out": (_metrics(o__cosine=None), "the cosine of o is None"),
    "a low cosine": (_metrics(o__cosine=0.5), "the cosine of o is 0.5"),
    "no metric at all": (_changed(metrics={}), "it has no rms error"),
    "metrics of another op": (_changed(metrics={"y.rms": 0.0, "y.rms.bar": 1.0}), "it has no rms error"),
    "codes where errors are owed": (_changed(metrics={"o.wrong": 0.0, "lse.wrong": 0.0}), "it has no rms error of o"),
    "bars that a kernel of zeros passes": (
        _metrics(o__max=0.9, o__max__bar=1e300),
        "the bar of the max error of o is 1e+300",
    ),
    "digests taken out": (lambda: [{**_header(), "digests": {}}, RECORD], "nothing says what its rows were held to"),
    "wrong codes": (
        lambda: [_header(), {**RECORD, "case": f"{CASE},inputs=exact_sums", "metrics": {**ERRORS, "o.wrong": 3.0}}],
        "3 elements of o are wrong",
    ),
    "no program": (_changed(program_sha256=None), "it names no program"),
    "no digest of an input": (_changed(input_sha256={"q": "1"}), "not of every input"),
    "no counters": (_changed(counters={}), "its counter minimum_bytes is 0 or missing"),
    "a counter of 0": (_changed(counters={**RECORD["counters"], "instructions_control": 0}), "instructions_control"),
    "no such case": (_changed(case="fmha:hd=63"), "its case is none"),
    "two programs": (lambda: [_header(), RECORD, {**LAZY, "program_sha256": "q" * 64}], "of different programs"),
    "figures of another program": (
        lambda: [_header(), RECORD, {**FIGURES, "program_sha256": "q" * 64}],
        "of different programs",
    ),
    "other inputs": (
        lambda: [_header(), RECORD, {**LAZY, "input_sha256": {"q": "4", "k": "2", "v": "3"}}],
        "had different inputs q",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_closes_the_gate(name: str) -> None:
    lines, words = FORGERIES[name]
    found = _findings(*lines())
    assert any(words in sentence for sentence in found), f"{name} must be noticed; the gate says: {found or 'nothing'}"


def test_an_honest_run_has_no_finding() -> None:
    assert _findings(_header(), RECORD, LAZY, FIGURES) == []


def test_a_line_of_no_run_does_not_count() -> None:
    data = json.dumps(RECORD).encode() + b"\n"
    (file,) = checked([parse_records(Path("r.jsonl"), data)], OURS, SPECS).files
    assert not file.lines, "a row without a header must be missing, not passed"


def test_other_code_closes_a_strict_gate_only() -> None:
    data = b"".join(json.dumps(line).encode() + b"\n" for line in (_header(digests={**OURS, "code": "x"}), RECORD))
    (finding,) = checked([parse_records(Path("r.jsonl"), data)], OURS, SPECS).findings
    assert not finding.closes, "with_findings(strict=True) makes it close"
    assert finding.kind == "revision"


@pytest.mark.parametrize("how", ["of an older schema", "committed"])
def test_an_older_run_is_taken_as_it_is_and_closes_a_strict_gate(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    older = _header()
    del older["digests"]
    lines = [older, {**RECORD, "metrics": {}}]
    if how == "committed":
        monkeypatch.setattr("megamoe.gate.evidence.committed", lambda path: True)
    else:
        lines = [{**line, "schema_version": 1} for line in lines]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    (finding,) = checked([parse_records(Path("r.jsonl"), data)], OURS, SPECS).findings
    assert "has no digests: its lines are taken as they are" in finding.sentence
    assert not finding.closes, "with_findings(strict=True) makes it close"


def test_lines_of_today_under_an_old_header_are_no_older_run() -> None:
    older = {**_header(), "schema_version": 1}
    del older["digests"]
    assert any("nothing says what" in one for one in _findings(older, RECORD)), "no megamoe wrote such a run"


def test_honest_records_of_every_kind_of_output_are_evidence() -> None:
    file = read_records(ROOT / "results" / "records" / "smoke.jsonl")
    (header,) = file.headers
    kinds = {name.split(".")[1] for one in file.records for name in one.metrics if name.startswith(("o.", "a2_codes."))}
    assert {"wrong", "rms"} <= kinds, "outputs that are held bit for bit are among them"
    assert checked([file], header.digests, SPECS).findings == ()


@pytest.mark.parametrize("text", ['{"a":1,"a":2}', '{"schema_version":2,"x":{"b":1,"b":1}}'])
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    with pytest.raises(RecordError, match=r"line 1: .*stands twice"):
        parse_records(Path("r.jsonl"), text.encode() + b"\n")


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, str]:
    key = Ed25519PrivateKey.generate()
    path = tmp_path / "key.pem"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path, key.public_key().public_bytes_raw().hex()


def _signed_file(key: Path) -> bytes:
    data = b"".join(json.dumps(line).encode() + b"\n" for line in (_header(), RECORD))
    return data + signed("run-1", data, private_key(key)).model_dump_json().encode() + b"\n"


def _distrusted(data: bytes, known: str) -> list[str]:
    file = parse_records(Path("r.jsonl"), data)
    signatures = {line.run: line for line in file.lines if isinstance(line, Signature)}
    return distrusted(file.path, data, signatures, frozenset([known]))


def test_a_signed_run_is_trusted_and_a_changed_one_is_not(keys: tuple[Path, str]) -> None:
    path, public = keys
    data = _signed_file(path)
    assert _distrusted(data, public) == []
    assert _distrusted(data + data.replace(b"run-1", b"run-2"), public), "a signature of one run is none of another"
    assert "does not fit its lines" in _distrusted(data.replace(b"instructions_control", b"instructions"), public)[0]
    assert "not among the trusted keys" in _distrusted(data, "0" * 64)[0]
    assert "is not signed" in _distrusted(b"".join(data.splitlines(True)[:-1]), public)[0]


@pytest.mark.parametrize(("text", "words"), [("", "no key"), ("xyz", "line 1: 'xyz' is no public key")])
def test_a_file_of_keys_that_is_none_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(RecordError, match=words):
        trusted_keys(tmp_path / "keys")
    with pytest.raises(RecordError, match="holds no private key"):
        private_key(tmp_path / "keys")


def test_digests_are_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a")
    first = digests_of(tmp_path)
    (tmp_path / "x.yaml").write_text("b")
    assert digests_of(tmp_path)["specs"] != first["specs"]
    assert digests_of(tmp_path)["code"] == first["code"], "the code was not touched"
