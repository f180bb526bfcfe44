"""Packed conversations: who sees whom, where positions restart, what is predicted and right."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("torch", reason="training needs the extra training")

from forge_station.contract import spec, tasks
from forge_station.contract.spec import Product, Reading
from forge_station.contract.views import MARKS, NANO_LAYOUT, VIEWS
from forge_station.vlm import grammar
from forge_station.vlm.grid_readout import text_tokens
from forge_station.vlm.text import TextCodec
from training.nano import model as nano
from training.nano import pack

NUT, BIG, BOLT, PIN = "hex_nut M8", "hex_nut M10", "hex_bolt M8x30", "pin 6x20"
READINGS = {"A": NUT, "B": BOLT, "C": NUT}
SIZES = {"A": (14.9, 13.0, 6.5), "B": (35.3, 15.0, 13.0), "C": (14.9, 13.0, 6.5)}
WORDS = nano.vocabulary()


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def packed() -> pack.Packed:
    return pack.pack_sheet(READINGS, SIZES, 0.5, (56, 112), rng())


def branches(packed: pack.Packed) -> dict[int, list[int]]:
    """Branch number -> its places in the sequence."""
    found: dict[int, list[int]] = {}
    for place, segment in enumerate(packed.segment):
        if segment >= pack.FIRST_BRANCH:
            found.setdefault(segment, []).append(place)
    return found


def key_of(packed: pack.Packed, places: list[int]) -> str:
    return WORDS[packed.tokens[places[0]]]


def answers(packed: pack.Packed) -> list[tuple[str, str]]:
    """(key, everything that is predicted in that branch), tokens joined without spaces."""
    found = []
    for places in branches(packed).values():
        wanted = [packed.target[place] for place in places if packed.target[place] != pack.IGNORE]
        keys = len(places) - len(wanted) + 1
        key = "".join(WORDS[packed.tokens[place]] for place in places[:keys])
        found.append((key, "".join(WORDS[token] for token in wanted)))
    return found


def test_only_answer_tokens_are_predicted(packed):
    text = dict(answers(packed)[:3])
    assert text == {"A:": "hex_nutM8\n", "B:": "hex_boltM8x30\n", "C:": "hex_nutM8\n"}
    for place, segment in enumerate(packed.segment):
        predicts = packed.target[place] != pack.IGNORE
        assert predicts <= (segment >= pack.FIRST_BRANCH)
        assert (packed.weight[place] > 0) == predicts


def test_a_target_is_the_next_token_of_its_own_branch(packed):
    for places in branches(packed).values():
        for place in places[:-1]:
            if packed.target[place] != pack.IGNORE:
                assert packed.target[place] == packed.tokens[place + 1]


def test_none_ends_itself_and_other_answers_end_in_newline():
    sequence = pack.Packed()
    sequence.add_branch("answer:", "none", 0)
    sequence.add_branch("answer:", "B", 0)
    assert answers(sequence) == [("answer:", "none"), ("answer:", "B\n")]


def test_positions_restart_behind_the_text_a_branch_hangs_on(packed):
    """One height after the trunk for turn one, another after turn two's text for its branches."""
    trunk_end = max(
        max(where)
        for where, segment in zip(packed.position, packed.segment, strict=True)
        if segment == pack.TRUNK
    )
    turn_two = [
        packed.position[place]
        for place, segment in enumerate(packed.segment)
        if segment == pack.TURN_TWO
    ]
    assert turn_two[0] == (trunk_end + 1,) * 3
    assert [where[0] for where in turn_two] == list(
        range(trunk_end + 1, trunk_end + 1 + len(turn_two))
    )
    for places in branches(packed).values():
        second = packed.parent[places[0]] == pack.TURN_TWO
        start = trunk_end + 1 + (len(turn_two) if second else 0)
        expected = [(start + i,) * 3 for i in range(len(places))]
        assert [packed.position[place] for place in places] == expected


def test_a_token_sees_its_past_its_trunk_and_never_another_branch(packed):
    mask = pack.collate([packed]).mask[0, 0].numpy()
    for place, segment in enumerate(packed.segment):
        seen = {packed.segment[other] for other in np.flatnonzero(mask[place])}
        if segment == pack.TRUNK:
            assert seen == {pack.TRUNK}
        elif segment == pack.TURN_TWO:
            assert seen == {pack.TRUNK, pack.TURN_TWO}, "no reading of turn one"
        elif packed.parent[place] == pack.TURN_TWO:
            assert seen == {pack.TRUNK, pack.TURN_TWO, segment}
        else:
            assert seen == {pack.TRUNK, segment}, "turn one never sees the specification"
        assert not mask[place, place + 1 :].any(), "nothing sees the future"
        own = [other for other in range(place + 1) if packed.segment[other] == segment]
        assert mask[place, own].all()
        trunk = [other for other in range(place) if packed.segment[other] == pack.TRUNK]
        assert mask[place, trunk].all()


def test_padding_sees_and_is_seen_by_padding_only(packed):
    short = pack.pack_judgement({"A": NUT, "B": NUT}, rng())
    batch = pack.collate([short, packed])
    assert batch.tokens.shape[1] % 8 == 0
    length = len(short.tokens)
    mask = batch.mask[0, 0].numpy()
    assert not mask[:length, length:].any()
    assert not mask[length:, :length].any()
    assert mask.diagonal().all(), "a row without anything to see would give NaN"
    assert (batch.target[0, length:] == pack.IGNORE).all()
    assert (batch.weight[0, length:] == 0).all()
    assert (batch.segment[0, length:] == pack.PAD).all()


def test_the_trunk_is_what_the_station_sends(packed):
    """Tokens and positions of `checks.read_marks`: system, picture, facts, assistant."""
    facts = tasks.sheet_facts(SIZES, 0.5)
    pad = WORDS.index(tasks.IMAGE_TOKEN)
    before = pack.encode(tasks.TRUNK_OPEN + tasks.IMAGE_OPEN)
    after = pack.encode(tasks.IMAGE_CLOSE + facts + tasks.ASSISTANT)
    expected = [*before, *[pad] * nano.image_tokens(56, 112), *after]
    trunk = [t for t, s in zip(packed.tokens, packed.segment, strict=True) if s == pack.TRUNK]
    assert trunk == expected
    positions = nano.trunk_positions(np.array(expected), pad, 56, 112)
    assert [list(where) for where in packed.position[: len(trunk)]] == positions.T.tolist()


def test_turn_two_gives_readings_and_specification_as_the_station_does(packed):
    text = [t for t, s in zip(packed.tokens, packed.segment, strict=True) if s == pack.TURN_TWO]
    opening = pack.encode(tasks.readings_text(READINGS) + tasks.NEXT_USER)
    assert tuple(text[: len(opening)]) == opening
    assert tuple(text[-4:]) == pack.encode(tasks.ASSISTANT)[-4:]


def surface(
    grid: np.ndarray,
    seed: int = 1,
    score: int = 4,
    defect: str = "dent",
    form: pack.GridForm = "rows",
) -> pack.Packed:
    size = NANO_LAYOUT.surface_size
    return pack.pack_surface(NUT, (14.9, 13.0, 6.5), defect, grid, score, size, rng(seed), form)


def test_a_grid_as_one_text_is_packed_as_the_read_out_writes_it(tmp_path):
    grid = np.zeros((3, 16, 16), bool)
    grid[0, 4, [4, 5, 8]] = grid[0, 10, 15] = grid[2, 15, [0, 15]] = True
    nano.build_tokenizer(()).save(str(tmp_path / "tokenizer.json"))
    codec = TextCodec.open(tmp_path / "tokenizer.json")
    keys = [tasks.row_key(view, row) for view in VIEWS for row in range(16)]
    written = text_tokens(grammar.rows(codec, keys), grid.reshape(48, 16))
    for cells, wanted in ((grid, written), (np.zeros_like(grid), pack.encode(tasks.GRID_END))):
        packed = joint(cells, form="text")
        keyed = [key for key, _ in answers(packed)]
        assert keyed == ["class:", "score:", tasks.GRID_KEY]
        last = list(branches(packed).values())[-1]
        predicted = [packed.target[place] for place in last]
        assert tuple(t for t in predicted if t != pack.IGNORE) == wanted


def rows_of(packed: pack.Packed) -> dict[str, tuple[str, float]]:
    """Row key -> (answer, weight of its tokens)."""
    found = {}
    for (key, answer), places in zip(answers(packed), branches(packed).values(), strict=True):
        if key.startswith(VIEWS):
            weights = {packed.weight[p] for p in places if packed.target[p] != pack.IGNORE}
            (weight,) = weights
            found[key] = (answer, weight)
    return found


def joint(grid: np.ndarray, **more: object) -> pack.Packed:
    """A surface sample whose request is `joint` (drawn four times in five)."""
    for seed in range(20):
        found = surface(grid, seed, **more)  # type: ignore[arg-type]
        keys = [key for key, _ in answers(found)]
        if "score:" in keys and len(keys) > 2:
            return found
    raise AssertionError("no joint request in 20 draws")


def test_rows_say_their_columns_and_empty_rows_count_a_quarter():
    grid = np.zeros((3, 16, 16), bool)
    grid[0, 4, [4, 5, 8]] = True
    grid[2, 15, [0, 15]] = True
    rows = rows_of(joint(grid))
    assert rows["frontr5:"] == ("5,6,9\n", 1.0)
    assert rows["topr16:"] == ("1,16\n", 1.0)
    empty = {key: row for key, row in rows.items() if row[0] == "none"}
    assert len(empty) == 12
    for _, weight in empty.values():
        assert weight == pytest.approx(46 / 12 * pack.NONE_WEIGHT)
    assert len(rows) == 14


def test_the_drawn_rows_weigh_as_much_as_all_rows():
    grid = np.ones((3, 16, 16), bool)
    grid[1, :8] = False
    rows = rows_of(joint(grid))
    filled = [weight for answer, weight in rows.values() if answer != "none"]
    empty = [weight for answer, weight in rows.values() if answer == "none"]
    assert (len(filled), len(empty)) == (12, 8)
    assert sum(filled) == pytest.approx(40)
    assert sum(empty) == pytest.approx(8 * pack.NONE_WEIGHT)


def test_a_request_decides_what_is_answered():
    grid = np.zeros((3, 16, 16), bool)
    kinds = Counter()
    for seed in range(150):
        keys = [key for key, _ in answers(surface(grid, seed))]
        assert keys[0] == "class:"
        rows = any("r1" in key or "r2" in key or "r3" in key for key in keys)
        kinds["score:" in keys, rows] += 1
    assert set(kinds) == {(True, True), (True, False), (False, True)}
    assert 100 < kinds[True, True] < 140


def test_class_and_score_weights():
    packed = joint(np.zeros((3, 16, 16), bool), score=10, defect="normal")
    weights = {
        key: {packed.weight[p] for p in places if packed.target[p] != pack.IGNORE}
        for (key, _), places in zip(answers(packed), branches(packed).values(), strict=True)
    }
    assert weights["class:"] == {2.0}
    assert weights["score:"] == {0.5}
    assert dict(answers(packed))["class:"] == "normal\n"
    assert dict(answers(packed))["score:"] == "10/10\n"


@pytest.mark.parametrize(
    ("kind", "required", "readings", "wrong", "missing", "score"),
    [
        ("batch", None, "NNN", "", "none", 10),
        ("batch", None, "NBN", "B", "none", 7),
        ("batch", None, "GNBN", "AC", "none", 4),
        ("batch", {NUT: 3}, "NNN", "", "none", 10),
        ("batch", {BIG: 3}, "NNN", "ABC", "none", 1),
        ("batch", {BIG: 4}, "NNNN", "ABCD", "none", 0),
        ("assembly", {NUT: 2, BOLT: 1}, "NBN", "", "none", 10),
        ("assembly", {NUT: 1, BOLT: 1}, "NBN", "C", "none", 7),
        ("assembly", {NUT: 2, BOLT: 1, PIN: 1}, "NBN", "", PIN, 7),
        ("assembly", {NUT: 3, BOLT: 1}, "NBN", "", NUT, 7),
        ("assembly", {NUT: 2, PIN: 1}, "NBN", "B", PIN, 7),
        ("assembly", {BIG: 2, PIN: 1}, "NBN", "ABC", BIG, 1),
        ("assembly", {PIN: 1}, "NBN", "ABC", PIN, 1),
        ("assembly", {PIN: 4}, "NBN", "ABC", PIN, 0),
    ],
)
def test_right_answers_by_hand(kind, required, readings, wrong, missing, score):
    parts = {"N": NUT, "G": BIG, "B": BOLT, "P": PIN}
    read = {mark: parts[letter] for mark, letter in zip(MARKS, readings, strict=False)}
    right = pack.judge(kind, required, read)
    assert "".join(right.wrong) == wrong
    assert right.answer == (wrong[:1] or "none")
    assert (right.missing, right.score) == (missing, score)


def scenes(count: int) -> list[dict[str, str]]:
    """Trays of equal parts, with an odd one, of two halves, and mixed."""
    drawn, found = rng(7), []
    for _ in range(count):
        pieces = int(drawn.integers(2, 7))
        kinds = [str(part) for part in drawn.choice(pack.PART_IDS, int(drawn.integers(1, 4)))]
        parts = [kinds[min(int(k), len(kinds) - 1)] for k in drawn.geometric(0.7, pieces) - 1]
        found.append({MARKS[i]: part for i, part in enumerate(parts)})
    return found


def test_the_taught_answers_are_those_of_the_rule_engine():
    """With certain readings `contract.spec` objects to the same marks."""
    draws = rng(3)
    for readings in scenes(300):
        kind, required = pack.random_requirement(readings, draws)
        counts = Counter(readings.values()).most_common(1)[0][1]
        if required is None and 2 * counts <= len(readings):
            continue  # the station calls no part odd without a majority
        parts = required or {}
        pieces = sum(parts.values()) or len(readings)
        if (
            pieces > len(MARKS)
            or (required is None and len(readings) < 3)
            or (kind == "assembly" and pieces < 2)
        ):
            continue  # no product of the station can be so
        product = Product(
            "P", kind, ("assembly",) if kind == "assembly" else ("workpiece",), parts,
            count=None if parts else len(readings),
        )  # fmt: skip
        judged = spec.evaluate(product, {mark: Reading(p, 1.0) for mark, p in readings.items()})
        right = pack.judge(kind, required, readings)
        assert judged.marks == right.wrong
        lacking = {
            item.expected
            for item in judged.violations
            if item.code in ("MISSING_PART", "WRONG_MODEL", "WRONG_WORKPIECE")
        }
        if kind == "assembly":
            assert (right.missing == "none") == (not lacking)
            assert right.missing == "none" or right.missing in lacking
        assert right.score == tasks.conformity_score(len(judged.violations))


def test_every_kind_of_answer_occurs_in_300_draws():
    draws = rng(0)
    seen: Counter[str] = Counter()
    for readings in scenes(300):
        kind, required = pack.random_requirement(readings, draws)
        right = pack.judge(kind, required, readings)
        name = "majority" if required is None else kind
        seen[f"{name} {'right' if not right.wrong else 'wrong'}"] += 1
        seen[f"missing {right.missing != 'none'}"] += 1
        seen[f"score {right.score}"] += 1
        seen[f"letter {right.answer}"] += 1
        if right.missing != "none" and right.wrong:
            seen["swapped"] += 1
    for name in ("majority", "batch", "assembly"):
        assert seen[f"{name} right"] >= 5, seen
        assert seen[f"{name} wrong"] >= 5, seen
    assert min(seen["missing True"], seen["missing False"], seen["swapped"]) >= 15, seen
    assert {f"score {n}" for n in (10, 7, 4, 0)} <= set(seen)
    assert {f"letter {mark}" for mark in ("none", *"ABCDE")} <= set(seen)


def test_a_requirement_never_asks_for_nothing():
    draws = rng(5)
    for readings in scenes(200):
        _, required = pack.random_requirement(readings, draws)
        assert required is None or all(count > 0 for count in required.values())
        assert required is None or required


def test_turn_two_judges_every_mark(packed):
    second = [
        (key_of(packed, places), WORDS[packed.target[places[0]]])
        for places in branches(packed).values()
        if packed.parent[places[0]] == pack.TURN_TWO
    ]
    assert [key for key, _ in second] == ["A:", "B:", "C:", "answer:", "missing:", "score:"]
    assert {word for _, word in second[:3]} <= {tasks.RIGHT, tasks.WRONG}


def test_a_judgement_without_a_picture_has_no_image_tokens():
    found = pack.pack_judgement(READINGS, rng())
    assert WORDS.index(tasks.IMAGE_TOKEN) not in found.tokens
    assert set(found.segment[:5]) == {pack.TRUNK}
