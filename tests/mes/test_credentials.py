"""Whose certificate it is, how long it holds, and its replacement while the station runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forge_station.errors import LinkError
from forge_station.mes import credentials
from forge_station.mes.topics import MqttConfig
from tests.mes.certificates import Authority
from tests.mes.rig import wait_for


def config_of(authority: Authority, name: str = "s1", days: float = 90) -> MqttConfig:
    certificate, key = authority.issue(name, days)
    return MqttConfig(
        station="s1", tls=True, tls_ca=authority.file, tls_cert=certificate, tls_key=key
    )


def test_own_certificate_is_taken_and_none_is_needed(tmp_path: Path) -> None:
    credentials.require(config_of(Authority(tmp_path)))
    credentials.require(MqttConfig())


@pytest.mark.parametrize(
    ("name", "days", "mode", "said"),
    [
        ("s2", 90, 0o600, "another station's.*expected CN=s1.*got CN=s2"),
        ("s1", -1, 0o600, "has ended.*1.0 days ago"),
        ("s1", 90, 0o644, "read by everybody.*chmod 600"),
    ],
)
def test_certificate_that_must_not_be_used(
    tmp_path: Path, name: str, days: float, mode: int, said: str
) -> None:
    config = config_of(Authority(tmp_path), name, days)
    assert config.tls_key is not None
    config.tls_key.chmod(mode)
    with pytest.raises(LinkError, match=said):
        credentials.require(config)


def test_unreadable_certificate_is_a_clear_error(tmp_path: Path) -> None:
    config = config_of(Authority(tmp_path))
    assert config.tls_cert is not None
    config.tls_cert.write_text("not PEM")
    with pytest.raises(LinkError, match=r"cannot be read.*s1\.crt"):
        credentials.require(config)
    with pytest.raises(LinkError, match="cannot be read"):
        credentials.require(replace(config, tls_cert=tmp_path / "none.crt"))


def test_days_until_the_end(tmp_path: Path) -> None:
    certificate, _ = Authority(tmp_path).issue("s1", 30)
    assert credentials.days_until(credentials.read(certificate)) == pytest.approx(30, abs=0.01)


class TestWatch:
    def test_nothing_is_told_while_nothing_changes(self, tmp_path: Path) -> None:
        told: list[str] = []
        watch = credentials.Watch(config_of(Authority(tmp_path)), told.append)
        assert not watch.look()
        assert told == []

    def test_renewal_is_told_once_when_certificate_and_key_fit(self, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        config = config_of(authority)
        told: list[str] = []
        watch = credentials.Watch(config, told.append)
        certificate, key = authority.issue("s1", file="new")
        assert config.tls_cert is not None
        assert config.tls_key is not None
        certificate.rename(config.tls_cert)
        assert not watch.look()  # the old key does not belong to it
        key.rename(config.tls_key)
        assert watch.look()
        assert not watch.look()
        assert told == ["the credentials were replaced"]

    def test_another_stations_certificate_is_not_taken_over(self, tmp_path: Path) -> None:
        authority = Authority(tmp_path)
        config = config_of(authority)
        told: list[str] = []
        watch = credentials.Watch(config, told.append)
        authority.issue("s2", file="s1")
        assert not watch.look()
        assert told == []

    def test_it_looks_by_itself(self, tmp_path: Path) -> None:
        secret = tmp_path / "password"
        secret.write_text("one")
        config = MqttConfig(username="s1", password_file=secret)
        told: list[str] = []
        with credentials.Watch(config, told.append, look_s=0.01):
            secret.write_text("two, longer")
            assert wait_for(lambda: told)
