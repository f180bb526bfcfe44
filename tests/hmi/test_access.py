"""Who may do what on the page: users, sessions, the lock, roles against routes, the audit."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from forge_station import cli
from forge_station.hmi.app import TOKEN, build, table
from forge_station.hmi.audit import Audit, AuditError
from forge_station.hmi.context import COOKIE, Context
from forge_station.hmi.sessions import (
    IDLE_S,
    LOCK_S,
    LONGEST_LOCK_S,
    LONGEST_S,
    WRONG_PINS,
    LockedError,
    RefusedError,
    Sessions,
    most_tries,
)
from forge_station.hmi.users import Role, User, Users, UsersError
from tests.hmi.stage import Stage, station_file

ORIGIN = "http://127.0.0.1"
PINS = {"anna": "246801", "ben": "135790", "lea": "975310", "eva": "864209"}
ROLES = {"anna": Role.ADMIN, "ben": Role.OPERATOR, "lea": Role.LEAD, "eva": Role.ENGINEER}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def users(tmp_path: Path) -> Users:
    found = Users(tmp_path / "users.json")
    for name, pin in PINS.items():
        found.add(name, ROLES[name], pin)
    return found


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def page(stage: Stage, clock: Clock) -> Iterator[tuple[TestClient, Context]]:
    context = Context.of(stage.config, clock)
    for name, pin in PINS.items():
        context.users.add(name, ROLES[name], pin)
    with TestClient(build(context), base_url=ORIGIN) as client:
        yield client, context


def login(client: TestClient, name: str, pin: str = "") -> dict[str, Any]:
    """Of what the session says; the cookie stays in the client."""
    answer = client.post(
        "/api/session/login", json={"name": name, "pin": pin or PINS[name]},
        headers={"origin": ORIGIN},
    )  # fmt: skip
    return {"status": answer.status_code, **answer.json()}


def test_the_first_user_is_an_admin_and_the_last_admin_stays(tmp_path: Path) -> None:
    users = Users(tmp_path / "users.json")
    with pytest.raises(UsersError, match="first user must be an admin"):
        users.add("ben", Role.OPERATOR, "135790")
    users.add("anna", Role.ADMIN, "246801")
    users.add("ben", Role.OPERATOR, "135790")
    with pytest.raises(UsersError, match="last admin"):
        users.remove("anna")
    with pytest.raises(UsersError, match="there is such a user"):
        users.add("ben", Role.LEAD, "135790")
    with pytest.raises(UsersError, match="no login"):
        users.add("gast", Role.VIEWER, "135790")
    assert users.remove("ben") == User("ben", Role.OPERATOR)
    assert users.all() == (User("anna", Role.ADMIN),)


@pytest.mark.parametrize(
    "pin", ["12345", "123456", "654321", "111111", "12345a", "1" * 13, "١٢٣٤٥٧"]
)
def test_pins_that_are_guessed_first_are_refused(tmp_path: Path, pin: str) -> None:
    with pytest.raises(UsersError, match="PIN"):
        Users(tmp_path / "users.json").add("anna", Role.ADMIN, pin)


@pytest.mark.parametrize("name", ["", "a b", "x" * 33, "../anna", "anna\n"])
def test_names_that_could_mislead_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsersError, match="no name"):
        Users(tmp_path / "users.json").add(name, Role.ADMIN, "246801")


def test_the_file_of_users_gives_no_pin_away(users: Users) -> None:
    text = users.path.read_text()
    assert not any(pin in text for pin in PINS.values())
    facts = json.loads(text)["users"]
    assert len({item["salt"] for item in facts.values()}) == len(PINS)
    assert users.path.stat().st_mode & 0o077 == 0
    assert users.path.with_suffix(".key").stat().st_mode & 0o077 == 0
    users.path.with_suffix(".key").write_bytes(bytes(32))  # a copy on another device
    assert users.check("anna", PINS["anna"]) is None


def test_a_damaged_file_of_users_lets_nobody_in(users: Users) -> None:
    users.path.write_text("{")
    with pytest.raises(UsersError, match="damaged"):
        users.check("anna", PINS["anna"])


@pytest.mark.parametrize(
    "text",
    [
        "{", "[" * 50_000, '{"users": []}', '{"users": {"anna": 5}}',
        '{"users": {"anna": {"role": "king", "salt": "00", "pin": "00"}}}',
        '{"users": {"anna": {"role": "admin", "salt": "x", "pin": 5}}}',
    ],
)  # fmt: skip
def test_a_damaged_file_of_users_leaves_a_page_to_look_at(
    page: tuple[TestClient, Context], text: str
) -> None:
    client, context = page
    assert login(client, "anna")["status"] == 200
    assert client.get("/api/session").json()["name"] == "anna"
    context.users.path.write_text(text)
    assert client.get("/api/session").json()["name"] == ""
    assert client.get("/api/page").json()["names"] == []
    assert client.get("/api/live").status_code == 200
    assert client.get("/api/history/parts").status_code == 403
    refused = login(client, "anna")
    assert refused["status"] == 409 and "is damaged" in refused["text"]


@pytest.mark.parametrize("name", sorted(PINS))
def test_a_session_ends_when_nothing_is_done(users: Users, clock: Clock, name: str) -> None:
    sessions = Sessions(users, clock)
    idle_s = IDLE_S[ROLES[name]]
    session = sessions.login(name, PINS[name], "panel")
    clock.now += idle_s - 1
    assert sessions.find(session.id, use=False) is session  # looking does not count as doing
    clock.now += 0.5
    assert sessions.find(session.id, use=True) is session
    clock.now += idle_s - 1
    assert sessions.find(session.id, use=False) is session
    clock.now += 2
    assert sessions.find(session.id, use=True) is None
    assert sessions.find(session.id, use=True) is None


def test_a_session_ends_after_twelve_hours_however_busy(users: Users, clock: Clock) -> None:
    sessions = Sessions(users, clock)
    session = sessions.login("ben", PINS["ben"], "panel")
    begun = clock.now
    while sessions.find(session.id, use=True) is not None:
        assert clock.now - begun < LONGEST_S
        clock.now += 200
    assert clock.now - begun == pytest.approx(LONGEST_S, abs=200)


def test_a_session_ends_with_its_user_or_role(users: Users, clock: Clock) -> None:
    sessions = Sessions(users, clock)
    ben, lea = (sessions.login(name, PINS[name], "panel") for name in ("ben", "lea"))
    users.remove("ben")
    users.remove("lea")
    users.add("lea", Role.OPERATOR, PINS["lea"])
    assert sessions.find(ben.id, use=True) is None
    assert sessions.find(lea.id, use=True) is None


def test_wrong_pins_lock_the_user_and_the_panel_for_a_time_that_doubles(
    users: Users, clock: Clock
) -> None:
    sessions = Sessions(users, clock)
    for _ in range(WRONG_PINS):
        with pytest.raises(RefusedError):
            sessions.login("ben", "000000", "panel-1")
    for name, panel in (("ben", "panel-2"), ("lea", "panel-1")):
        with pytest.raises(LockedError):  # though the PIN is right
            sessions.login(name, PINS[name], panel)
    assert sessions.login("lea", PINS["lea"], "panel-2").user.name == "lea"
    for doubled in range(1, 4):
        clock.now += LOCK_S * 2 ** (doubled - 1) - 1
        with pytest.raises(LockedError):
            sessions.login("ben", PINS["ben"], "panel-3")
        clock.now += 1
        with pytest.raises(RefusedError):
            sessions.login("ben", "000000", "panel-3")
    clock.now += LOCK_S * 8
    assert sessions.login("ben", PINS["ben"], "panel-1").user.name == "ben"
    with pytest.raises(RefusedError):  # the count begins anew
        sessions.login("ben", "000000", "panel-1")
    assert sessions.login("ben", PINS["ben"], "panel-1").user.name == "ben"


def test_a_lock_grows_no_longer_than_a_quarter_of_an_hour_and_guessing_stays_hopeless(
    users: Users, clock: Clock
) -> None:
    """Who guesses as fast as the locks let him for three days gets what `most_tries` says."""
    sessions = Sessions(users, clock)
    begun, tried, longest = clock.now, 0, 0.0
    sessions._users = _NobodyIsRight(users.path)  # scrypt takes its time 300 times
    while clock.now < begun + 3 * 86_400:
        try:
            sessions.login("ben", "000000", f"panel-{tried}")
        except RefusedError:
            tried += 1
        except LockedError as locked:
            longest = max(longest, locked.left_s)
            clock.now += locked.left_s
    assert longest == LONGEST_LOCK_S
    assert tried in (most_tries(3.0) - 1, most_tries(3.0))
    assert most_tries(1.0) == 104 and most_tries(365.0) < 0.04 * 10**6
    clock.now += LONGEST_LOCK_S
    sessions._users = users
    assert sessions.login("ben", PINS["ben"], "panel").user.name == "ben"


class _NobodyIsRight(Users):
    def check(self, name: str, pin: str) -> User | None:
        return None


def test_who_administers_the_users_ends_a_lock_and_the_audit_names_him(
    page: tuple[TestClient, Context], capsys: pytest.CaptureFixture[str]
) -> None:
    client, context = page
    for _ in range(WRONG_PINS):
        login(client, "ben", "000000")
    assert login(client, "ben")["error"] == "locked"
    station = str(context.config.outbox.with_name("station.yaml"))
    assert cli.main(["hmi", "user", "unlock", "--station", station]) == 0
    assert "may try again" in capsys.readouterr().out
    assert login(client, "ben")["status"] == 200
    (line,) = [line for line in context.audit.lines() if line["action"] == "user.unlock"]
    assert line["who"] and line["panel"] == "command line"
    for _ in range(WRONG_PINS):
        login(client, "ben", "000000")
    assert login(client, "ben")["error"] == "locked"  # it was for once


def test_many_guesses_at_once_are_no_more_than_one_after_the_other(
    users: Users, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every guess is let in before the first is found wrong."""
    sessions = Sessions(users, clock)
    check, looked_at = users.check, []
    together = threading.Event()

    def slow(name: str, pin: str) -> User | None:
        looked_at.append(pin)
        together.wait(10.0)
        return check(name, pin)

    def guess(number: int) -> None:
        with contextlib.suppress(LockedError, RefusedError):
            sessions.login("ben", f"{number:06}", f"panel-{number}")

    monkeypatch.setattr(users, "check", slow)
    threads = [threading.Thread(target=guess, args=(number,)) for number in range(3 * WRONG_PINS)]
    for thread in threads:
        thread.start()
    for thread in threads[WRONG_PINS:]:
        thread.join(0.05)
    together.set()
    for thread in threads:
        thread.join(10.0)
    assert len(looked_at) == WRONG_PINS
    with pytest.raises(LockedError):
        sessions.login("ben", PINS["ben"], "another panel")


def test_a_number_that_is_none_in_an_address_is_no_view(page: tuple[TestClient, Context]) -> None:
    client, _ = page
    login(client, "ben")
    for number in ("9" * 5000, "-1", "x", "\u0663"):
        assert client.get(f"/api/review/none/look/{number}").status_code in (404, 409)


@pytest.mark.parametrize(
    "content",
    [b"[" * 60_000, b'{"name": "ben\\ud800", "pin": "135790"}', b'{"name": "\xff"}', b"[]", b"{"],
    ids=["deep", "half a character", "no UTF-8", "list", "half"],
)
def test_what_is_no_request_is_said_to_be_none(
    page: tuple[TestClient, Context], content: bytes
) -> None:
    client, context = page
    answer = client.post("/api/session/login", content=content, headers={"origin": ORIGIN})
    assert answer.status_code == 409 and "not understood" in answer.json()["text"]
    assert not context.audit.path.exists()


def test_an_unknown_name_is_refused_like_a_wrong_pin(users: Users, clock: Clock) -> None:
    sessions = Sessions(users, clock)
    told = set()
    for name in ("ben", "nobody"):
        with pytest.raises(RefusedError) as refused:
            sessions.login(name, "000000", name)
        told.add(str(refused.value))
    assert len(told) == 1


def test_every_route_asks_for_its_role(page: tuple[TestClient, Context]) -> None:
    client, context = page
    routes = [item for item in table(context) if item[1] not in ("/api/events",)]
    assert len({(method, path) for method, path, _ in routes}) == len(routes)
    for name in ("", *PINS):
        client.cookies.clear()
        token = login(client, name)["token"] if name else ""
        role = ROLES.get(name, Role.VIEWER)
        for method, path, needed in routes:
            if path in ("/api/session/login", "/api/session/logout"):
                continue
            answer = client.request(
                method, filled(path), json={} if method == "POST" else None,
                headers={"origin": ORIGIN, TOKEN: token},
            )  # fmt: skip
            refused = answer.status_code == 403 and answer.json()["error"] == "role"
            assert refused == (role < needed), (name, method, path, answer.text)


def filled(path: str) -> str:
    """A path whose parameters name nothing."""
    return re.sub(r"\{\w+\}", "none", re.sub(r"\{\w+:int\}", "0", path))


def test_what_is_no_route_is_not_there(page: tuple[TestClient, Context]) -> None:
    client, _ = page
    for path in ("/api", "/api/users", "/static/../app.py", "/static/%2e%2e/app.py", "/docs"):
        assert client.get(path).status_code == 404, path
    assert client.put("/api/session/login", headers={"origin": ORIGIN}).status_code == 405


@pytest.mark.parametrize("origin", ["", "null", "http://evil.example", "https://127.0.0.1"])
def test_posts_of_other_pages_are_refused(page: tuple[TestClient, Context], origin: str) -> None:
    client, context = page
    token = login(client, "ben")["token"]
    headers = {"origin": origin, TOKEN: token} if origin else {TOKEN: token}
    for method, path, _ in table(context):
        if method == "POST":
            answer = client.post(filled(path), json={}, headers=headers)
            assert (answer.status_code, answer.json()["error"]) == (403, "origin"), path


def test_posts_without_the_token_of_the_session_are_refused(
    page: tuple[TestClient, Context],
) -> None:
    client, _ = page
    login(client, "ben")
    other = login(client, "ben")["token"][::-1]
    for token in ("", other):
        headers = {"origin": ORIGIN, TOKEN: token}
        answer = client.post("/api/session/touch", json={}, headers=headers)
        assert (answer.status_code, answer.json()["error"]) == (403, "token")


def test_a_name_that_was_rebound_to_this_machine_is_refused(
    page: tuple[TestClient, Context],
) -> None:
    client, _ = page
    assert client.get("/api/live", headers={"host": "evil.example"}).status_code == 400


def test_the_cookie_is_kept_from_scripts_and_other_sites(
    page: tuple[TestClient, Context],
) -> None:
    client, _ = page
    answer = client.post(
        "/api/session/login", json={"name": "ben", "pin": PINS["ben"]}, headers={"origin": ORIGIN}
    )
    cookie = answer.headers["set-cookie"].lower()
    assert cookie.startswith(COOKIE)
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert client.cookies[COOKIE] not in answer.text


def test_an_idle_session_becomes_a_viewer_in_place(
    page: tuple[TestClient, Context], clock: Clock
) -> None:
    client, _ = page
    assert login(client, "eva")["role"] == Role.ENGINEER
    clock.now += IDLE_S[Role.ENGINEER] + 1
    assert client.get("/api/session").json()["role"] == Role.VIEWER
    assert client.get("/api/live").status_code == 200  # the live screen stays as it was


def test_every_answer_forbids_other_origins(page: tuple[TestClient, Context]) -> None:
    client, _ = page
    for path in ("/", "/static/app.js", "/locale/de.json", "/api/page", "/api/none"):
        policy = client.get(path).headers["content-security-policy"]
        assert policy.startswith("default-src 'self'") and "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy


def test_a_login_that_cannot_be_audited_is_none(page: tuple[TestClient, Context]) -> None:
    client, context = page
    context.audit.path.parent.mkdir(exist_ok=True)
    context.audit.path.unlink(missing_ok=True)
    context.audit.path.mkdir()
    assert login(client, "ben")["status"] == 507
    assert client.get("/api/session").json()["role"] == Role.VIEWER


def test_logins_are_audited_without_the_pin(page: tuple[TestClient, Context]) -> None:
    client, context = page
    login(client, "ben", "000000")
    token = login(client, "ben")["token"]
    client.post("/api/session/logout", json={}, headers={"origin": ORIGIN, TOKEN: token})
    assert client.get("/api/session").json()["role"] == Role.VIEWER
    assert [(line["action"], line["who"]) for line in context.audit.lines()] == [
        ("login.refused", "ben"), ("login", "ben"), ("logout", "ben"),
    ]  # fmt: skip
    text = context.audit.path.read_text()
    assert PINS["ben"] not in text and "000000" not in text.replace("0" * 64, "")


@pytest.mark.parametrize("harm", ["change", "remove", "insert", "swap", "first"])
def test_a_changed_audit_is_found(tmp_path: Path, harm: str) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    for number in range(5):
        audit.add("review", who=f"u{number}", role="operator", panel="p", after={"n": number})
    assert len(list(audit.lines())) == 5
    lines = audit.path.read_text().splitlines()
    match harm:
        case "change":
            lines[2] = lines[2].replace("u2", "u9")
        case "remove":
            del lines[2]
        case "insert":
            lines.insert(2, lines[1])
        case "swap":
            lines[1], lines[2] = lines[2], lines[1]
        case "first":
            del lines[0]
    audit.path.write_text("\n".join(lines) + "\n")
    with pytest.raises(AuditError, match="was changed"):
        list(audit.lines())


@pytest.mark.parametrize("half", [False, True])
def test_a_long_line_of_the_audit_is_followed_by_others(tmp_path: Path, half: bool) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    for number in range(2):
        audit.add("order", who="u", role="operator", panel="p", after=f"{number}" * 200_000)
    if half:
        with audit.path.open("a") as file:
            file.write("3" * 200_000)
    audit.add("b", who="u", role="operator", panel="p")
    assert [line["action"] for line in audit.lines()] == ["order", "order", "b"]


@pytest.mark.parametrize("last", ['{"n": "1"}', '{"n": 1, "sha256": 0}', "\udcff", "[" * 50_000])
def test_nothing_is_added_to_an_audit_whose_last_line_is_none(tmp_path: Path, last: str) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    audit.add("a", who="u", role="operator", panel="p")
    with audit.path.open("a", errors="surrogateescape") as file:
        file.write(f"{last}\n")
    before = audit.path.read_bytes()
    with pytest.raises(AuditError, match="was changed"):
        audit.add("b", who="u", role="operator", panel="p")
    assert audit.path.read_bytes() == before


def test_half_a_line_of_a_power_cut_is_replaced(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    audit.add("a", who="u", role="operator", panel="p")
    with audit.path.open("a") as file:
        file.write('{"n": 2, "ts": "20')
    audit.add("b", who="u", role="operator", panel="p")
    assert [line["action"] for line in audit.lines()] == ["a", "b"]


def test_users_by_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(station_file(tmp_path))

    def command(*words: str, pin: str = "") -> int:
        monkeypatch.setattr("sys.stdin", __import__("io").StringIO(f"{pin}\n"))
        return cli.main(["hmi", *words, "--station", file])

    assert command("user", "add", "ben", "--pin-stdin", pin="135790") == 64
    assert "first user must be an admin" in capsys.readouterr().err
    assert command("user", "add", "anna", "--role", "admin", "--pin-stdin", pin="246801") == 0
    assert command("user", "add", "ben", "--pin-stdin", pin="123456") == 64
    assert command("user", "add", "ben", "--pin-stdin", pin="135790") == 0
    capsys.readouterr()
    assert command("user", "list") == 0
    assert capsys.readouterr().out.split() == ["admin", "anna", "operator", "ben"]
    assert command("user", "remove", "ben") == 0
    assert command("audit") == 0
    told = capsys.readouterr().out
    assert "user.add" in told and "user.remove" in told and "3 lines, the chain holds" in told
    path = tmp_path / "hmi" / "audit.jsonl"
    path.write_text(path.read_text().replace("operator", "engineer"))
    assert command("audit") == 1
    assert "was changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hmi", "expected"),
    [
        ({"host": "0.0.0.0"}, "tls_cert and tls_key"),
        ({"tls_cert": "a.pem"}, "tls_cert and tls_key together"),
        ({"shifts": ["22:00", "06:00"]}, "ascending"),
        ({"panel": {"diag_in": 0}}, "5.0 to 120.0"),
    ],
)
def test_settings_that_would_mislead_are_refused(
    tmp_path: Path, hmi: dict[str, Any], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["hmi", "user", "list", "--station", str(station_file(tmp_path, **hmi))]) == 64
    assert expected in capsys.readouterr().err


def test_a_page_for_other_machines_needs_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lan = {"host": "192.0.2.1", "tls_cert": "cert.pem", "tls_key": "key.pem"}
    file = station_file(tmp_path, **lan)
    assert cli.main(["hmi", "--station", str(file)]) == 64
    assert "without users" in capsys.readouterr().err
    file = station_file(tmp_path)
    assert cli.main(["hmi", "--station", str(file), "--host", "192.0.2.1"]) == 64
    assert "in the clear" in capsys.readouterr().err
