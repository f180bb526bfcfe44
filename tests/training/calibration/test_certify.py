"""Rows to a signed certificate in a bundle that a station trusts; ledger, keys and refusals."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forge_station import private_key
from forge_station.checks import SCORE_VERSION, Thresholds
from forge_station.contract import CONTRACT_VERSION
from forge_station.contract.certificate import CERTIFICATE_NAME, objections, uncovered
from forge_station.contract.manifest import MANIFEST_NAME, FileEntry, Manifest
from forge_station.contract.spec import Product
from forge_station.errors import ConfigError
from forge_station.permit import read_permit
from forge_station.signing import read_public_key
from tests.training.calibration.sets import row, rows
from training import calibrate
from training.calibration import keys, ledger, outcomes
from training.calibration.certify import Settings, certify
from training.calibration.error import CalibrationError
from training.calibration.limits import Target
from training.evaluation.rows import Row, write_row

NOW = datetime(2026, 11, 30, 14, tzinfo=timezone.utc)
MANIFEST = Manifest(
    "nano", "0.1.0", 1, CONTRACT_VERSION, "int8", {"decoder.onnx": FileEntry.of(b"weights")}
)
NUT = Product("NUT", "single", ("surface",), {"hex_nut M8": 1})


def settings(folder: Path, **changes: object) -> Settings:
    found = Settings(Target(0.01, 0.95, 0.02), folder / "looks.jsonl", fit_share=0.1)
    return replace(found, **changes)  # type: ignore[arg-type]


def write_rows(path: Path, given: list[Row]) -> Path:
    path.write_text("".join(write_row(item) + "\n" for item in given))
    return path


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "decoder.onnx").write_bytes(b"weights")
    (folder / MANIFEST_NAME).write_bytes(MANIFEST.to_json())
    return folder


def test_the_certificate_says_what_was_shown_and_holds_for_this_bundle(tmp_path):
    done = certify(rows(400, 700), MANIFEST, settings(tmp_path), NOW)
    found = done.certificate
    facts = {"model_sha256": MANIFEST.model_sha256, "score_version": SCORE_VERSION}
    assert objections(found, now=NOW, **facts) == ()
    assert (found.look, found.simulated, found.families) == (1, True, {"surface": ("hex_nut",)})
    assert found.rules == {"min_reading_probability": 0.6}
    assert found.provenance == {"simulated": len(done.found.parts)}
    assert found.dataset_sha256 == done.found.sha256
    assert found.expires == "2027-05-29T14:00:00Z"
    bad = done.found.of(defective=True)
    passed = sum(part.reach(done.temperatures) < found.limit_pass for part in bad)
    assert found.claims[0].escapes == passed < found.claims[0].rank
    assert found.claims[0].defective == len(bad)
    assert found.temperatures["surface"] == pytest.approx(1.0, abs=0.5)
    assert uncovered(found, NUT, {"hex_nut"}, True) is None
    assert uncovered(found, NUT, {"pin"}, True) is not None


def test_other_parts_may_fit_the_temperatures_but_not_the_same(tmp_path):
    done = certify(rows(50, 400), MANIFEST, settings(tmp_path), NOW, rows(100, 100, seed=1))
    assert len(done.fitted.parts) == 200 and len(done.found.parts) == 450
    with pytest.raises(CalibrationError, match="same parts would fit"):
        certify(rows(50, 400), MANIFEST, settings(tmp_path), NOW, rows(50, 400)[:3])


def test_every_look_at_the_same_parts_may_spend_less_until_none_is_left(tmp_path):
    """400 parts carry 1 % at the first look (348) and not at the second (486)."""
    first = certify(rows(50, 400), MANIFEST, settings(tmp_path), NOW, rows(50, 50, seed=1))
    assert first.certificate.look == 1
    again = certify(rows(50, 400), MANIFEST, settings(tmp_path), NOW, rows(50, 50, seed=1))
    assert again.certificate.sha256 == first.certificate.sha256, "the same look spends nothing"
    better = replace(MANIFEST, files={"decoder.onnx": FileEntry.of(b"retrained")})
    with pytest.raises(CalibrationError, match=r"look 2.*486 distinct"):
        certify(rows(50, 400), better, settings(tmp_path), NOW, rows(50, 50, seed=1))
    assert len(ledger.read(tmp_path / "looks.jsonl")) == 1, "a look that cannot pass is not taken"
    some_new = [*rows(50, 399)[:-1], *rows(50, 200, seed=5)]
    more = certify(some_new, better, settings(tmp_path), NOW, rows(50, 50, seed=1))
    assert more.certificate.look == 2, "a set that shares parts is no new set"
    all_new = certify(rows(50, 400, seed=9), better, settings(tmp_path), NOW, rows(50, 50, seed=1))
    assert all_new.certificate.look == 1


def test_another_claim_on_the_same_parts_is_another_look(tmp_path):
    certify(rows(50, 600), MANIFEST, settings(tmp_path), NOW, rows(50, 50, seed=1))
    other = settings(tmp_path, target=Target(0.02, 0.95, 0.02))
    done = certify(rows(50, 600), MANIFEST, other, NOW, rows(50, 50, seed=1))
    assert done.certificate.look == 2


def test_a_damaged_ledger_stops_everything(tmp_path):
    (tmp_path / "looks.jsonl").write_text("{}\n")
    with pytest.raises(CalibrationError, match="damaged"):
        certify(rows(50, 400), MANIFEST, settings(tmp_path), NOW)


def test_real_parts_need_a_word_on_how_their_truth_was_found(tmp_path):
    real = rows(50, 500, provenance="manual")
    with pytest.raises(CalibrationError, match="how the truth of the parts was found"):
        certify(real, MANIFEST, settings(tmp_path), NOW)
    told = settings(tmp_path, label_protocol="two people, blind", kappa=0.9)
    found = certify(real, MANIFEST, told, NOW).certificate
    assert (found.simulated, found.label_protocol, found.kappa) == (False, "two people, blind", 0.9)


def test_an_evaluation_tells_what_the_certificate_makes_of_its_passes(tmp_path, bundle):
    given = rows(300, 700)
    assert outcomes.figures(given, bundle) is None
    done = certify(given, MANIFEST, settings(tmp_path), NOW)
    keys.put(keys.signed(done.certificate, Ed25519PrivateKey.generate()), bundle)
    strange = row("x", "surface", -20.0, False, families=("pin",))
    found = outcomes.figures([*given, strange], bundle)
    assert found is not None and found["limit_pass"] == done.certificate.limit_pass
    counts = found["tasks"]["surface"]
    passing = [item for item in given if item.log_odds["surface"] < 0]
    limit = done.certificate.limit_pass * done.temperatures["surface"]
    good = sum(r.expected == "PASS" and r.log_odds["surface"] < limit for r in passing)
    assert counts["good"]["PASS"] == good and sum(counts["good"].values()) == 301
    bad = [item for item in passing if item.expected == "FAIL"]
    assert counts["defective"]["PASS"] + counts["defective"]["UNSURE"] == len(bad)
    assert counts["defective"]["FAIL"] == 700 - len(bad)
    assert outcomes.outcome(strange, done.certificate) == "UNSURE"


# ---------------------------------------------------------------- the command


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """(exit code, last line of standard output, or all of standard error)."""
    code = calibrate.main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out.strip().splitlines()[-1] if code == 0 else captured.err


def test_from_keys_to_a_station_that_may_say_pass(tmp_path, bundle, capsys):
    private, public = tmp_path / "keys/private.pem", tmp_path / "public.pem"
    code, _ = run(capsys, "keygen", "--private", private, "--public", public)
    assert code == 0 and stat.S_IMODE(private.stat().st_mode) == 0o600
    given = write_rows(tmp_path / "rows.jsonl", rows(300, 700))
    out = tmp_path / "out"
    words = ["--rows", given, "--bundle", bundle, "--escape", "0.01", "--out", out]
    code, last = run(capsys, *words, "--key", private)
    done = json.loads(last)
    assert code == 0 and done["signed"] and done["look"] == 1
    pictures = [Path(name) for name in done["files"] if name.endswith(".png")]
    assert len(pictures) == 3
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    trusted = [read_public_key(public)]
    permit = read_permit(bundle, MANIFEST, trusted, Thresholds(), Thresholds())
    assert permit.objection is None
    assert permit.certificate is not None and permit.certificate.sha256 == done["certificate"]

    (bundle / CERTIFICATE_NAME).unlink()
    draft = out / "certificate.json"
    code, _ = run(capsys, "sign", "--certificate", draft, "--bundle", bundle, "--key", private)
    assert code == 0
    assert read_permit(bundle, MANIFEST, trusted, Thresholds(), Thresholds()).objection is None

    (bundle / "decoder.onnx").write_bytes(b"swapped")
    swapped = replace(MANIFEST, files={"decoder.onnx": FileEntry.of(b"swapped")})
    (bundle / MANIFEST_NAME).write_bytes(swapped.to_json())
    code, said = run(capsys, "sign", "--certificate", draft, "--bundle", bundle, "--key", private)
    assert code == 1 and "other model files" in said
    after = read_permit(bundle, swapped, trusted, Thresholds(), Thresholds())
    assert "other model files" in (after.objection or "")


@pytest.mark.parametrize(
    ("given", "words", "said"),
    [
        (rows(10, 200), [], "too few defective parts"),
        (rows(10, 600, provenance="harvested"), [], "selected itself"),
        (rows(10, 600, provenance=""), [], "where parts come from is not told"),
        (rows(10, 600), ["--key", "none.pem"], "keygen"),
        (rows(10, 600), ["--promised", "none.json"], "promised sizes"),
    ],
)
def test_a_refusal_is_one_message_and_changes_no_bundle(
    tmp_path, bundle, capsys, given, words, said
):
    path = write_rows(tmp_path / "rows.jsonl", given)
    out = ["--out", tmp_path / "out"]
    code, text = run(capsys, "certify", "--rows", path, "--bundle", bundle, *out, *words)
    assert code == 1 and said in text and text.startswith("training.calibrate: ")
    assert sorted(item.name for item in bundle.iterdir()) == ["decoder.onnx", MANIFEST_NAME]


def test_no_key_is_ever_replaced_and_no_other_file_is_a_key(tmp_path, capsys):
    private, public = tmp_path / "a.pem", tmp_path / "b.pem"
    private_key.generate(private, public)
    with pytest.raises(ConfigError, match="a key is there already"):
        private_key.generate(private, tmp_path / "c.pem")
    with pytest.raises(ConfigError, match="not a private key"):
        private_key.read(public)


def test_the_help_teaches_the_steps(capsys):
    with pytest.raises(SystemExit):
        calibrate.main(["--help"])
    text = capsys.readouterr().out
    for word in ("keygen", "certify", "sign", "pod", "--provenance simulated", "CALIBRATION.md"):
        assert word in text
