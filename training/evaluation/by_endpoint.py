"""Cases put to a model behind an endpoint, in the papers' questions, answers read from free text.

One case to one row, as `by_station` does for a bundle. What is decided is the model's own letter:
no gate, no specification and no measured size stand behind it. A letter or a missing part is FAIL,
none of both PASS, an answer that cannot be read UNSURE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forge_station import checks
from forge_station.contract import tasks
from forge_station.contract.spec import Product
from forge_station.contract.views import LARGE_LAYOUT, MARKS, VIEWS
from forge_station.errors import StationError
from training.evaluation import case_input, prompts, replies
from training.evaluation.by_station import BAD_DATA
from training.evaluation.case_files import PHOTO, BadCase, Case, Setting
from training.evaluation.case_input import Seen
from training.evaluation.case_row import bad_row, blank_row, failed_row, product_of
from training.evaluation.cells import true_cells, true_photo_cells
from training.evaluation.endpoint import ChatClient, EndpointRefused
from training.evaluation.examples import Examples
from training.evaluation.pictures import COORDINATES, Shown, shown_of
from training.evaluation.prompts import Question
from training.evaluation.rows import Exchange, Probe, Row


@dataclass(frozen=True)
class Asking:
    """How a model is asked. `style`: metric, forge, channels or coordinates (see `pictures`)."""

    folder: Path
    examples: Examples
    defects: tuple[str, ...] = tasks.DEFECT_CLASSES
    """Classes of the two-part question, without normal."""
    setting: Setting | None = None
    style: str = "metric"
    request: str = "joint"
    sizes: bool = True
    probes: bool = False
    references: int = 1
    strict_first_letter: bool = False


def defects_of(cases: Sequence[Case | BadCase]) -> tuple[str, ...]:
    """The four classes of the benchmark, or those of a photo line as its cases name them."""
    named = {case.truth.defect for case in cases if isinstance(case, Case)} - {None, tasks.NORMAL}
    if named <= set(tasks.DEFECT_CLASSES):
        return tasks.DEFECT_CLASSES
    return tuple(sorted(name for name in named if name))


def run_case(client: ChatClient, case: Case | BadCase, asking: Asking) -> Row:
    """One case to one row. Raises only EndpointRefused, which every case would meet."""
    if isinstance(case, BadCase):
        return bad_row(case)
    setting = asking.setting or case.setting
    try:
        seen = case_input.look(case, asking.folder, LARGE_LAYOUT)
        shown = shown_of(case, seen, asking.folder, asking.style)
        before = _before(case, setting, asking)
        row = replace(blank_row(case, setting), sizes=asking.sizes)
        talk = _Talk(client, case, seen, shown, before, asking)
        if case.task == "surface":
            return _surface(talk, row)
        return _tray(talk, row)
    except EndpointRefused:
        raise
    except StationError as error:
        return failed_row(case, error.code, str(error), setting)
    except BAD_DATA as error:
        return failed_row(case, "INPUT_WRONG", f"{type(error).__name__}: {error}", setting)


@dataclass(frozen=True)
class Solved:
    """A solved example: its picture, and the case that knows the answers."""

    case: Case
    shown: Shown
    seen: Seen


@dataclass(frozen=True)
class _Before:
    """What is shown before the judged picture."""

    references: tuple[Shown, ...] = ()
    solved: tuple[Solved, ...] = ()


def _before(case: Case, setting: str, asking: Asking) -> _Before:
    if setting == "reference":
        shown = asking.examples.references(case, asking.references, asking.style)
        return _Before(references=tuple(shown))
    if setting == "demonstration":
        solved = []
        for example, folder in asking.examples.solved(case):
            seen = case_input.look(example, folder, LARGE_LAYOUT)
            solved.append(Solved(example, shown_of(example, seen, folder, asking.style), seen))
        return _Before(solved=tuple(solved))
    return _Before()


class _Talk:
    """One case's questions; collects exchanges and warnings."""

    def __init__(
        self,
        client: ChatClient,
        case: Case,
        seen: Seen,
        shown: Shown,
        before: _Before,
        asking: Asking,
    ) -> None:
        self.client, self.case, self.seen, self.asking = client, case, seen, asking
        self.shown, self.before = shown, before
        self.product: Product = product_of(case)
        self.exchanges: list[Exchange] = []
        self.warnings: list[str] = []

    def ask(self, question: Question) -> str:
        """The reply to one question; pictures of references and examples first, judged one last."""
        parts: list[Mapping[str, object]] = []
        for number, reference in enumerate(self.before.references, start=1):
            parts.append(_text(f"Reference {number}: this is what is right."))
            parts += reference.parts
        for number, solved in enumerate(self.before.solved, start=1):
            parts.append(_text(f"Example {number}:"))
            parts += solved.shown.parts
            asked, answer = solved_question(question.name, solved.case, self.asking)
            words = self._words(asked, solved.case, solved.seen, solved.shown)
            parts.append(_text(f"{words}\nRight answer:\n{answer}"))
        if self.before.references or self.before.solved:
            parts.append(_text("Now judge this one, the last:"))
        parts += self.shown.parts
        words = self._words(question, self.case, self.seen, self.shown)
        parts.append(_text(words))
        reply = self.client.ask(
            [
                {"role": "system", "content": prompts.SYSTEM},
                {"role": "user", "content": parts},
            ],
            {"case": self.case.id, "question": question.name, "prompt": words},
        )
        if reply.finish == "length":
            self.warnings.append(f"{question.name}:{replies.CUT_OFF}")
        self.exchanges.append(
            Exchange(question.name, words, reply.text, replies.VERSION, round(reply.latency_ms, 1))
        )
        return reply.text

    def _words(self, question: Question, case: Case, seen: Seen, shown: Shown) -> str:
        lines = [shown.words]
        sizes = sizes_of(seen)
        if self.asking.sizes and sizes and question.name not in ("MARK_TO_PLACE", "PLACE_TO_MARK"):
            if case.task == "surface":
                sizes = {"part": next(iter(sizes.values()))}
            lines.append(prompts.sizes_text(sizes))
        return "\n\n".join([*lines, question.text])

    def letter(self, question: Question) -> str:
        """The chosen option; "" where the reply names none."""
        strict = self.asking.strict_first_letter
        found = replies.letter(self.ask(question), question, strict_first_letter=strict)
        self.warnings += found.warnings
        return found.option

    def done(self, row: Row) -> Row:
        spent = sum(exchange.latency_ms for exchange in self.exchanges)
        return replace(
            row,
            exchanges=tuple(self.exchanges),
            warnings=tuple(self.warnings),
            model_ms=round(spent, 1),
        )


def _text(text: str) -> Mapping[str, object]:
    return {"type": "text", "text": text}


def sizes_of(seen: Seen) -> dict[str, tuple[float, float, float]]:
    """Measured boxes by mark; none on a photo."""
    if seen.pictures is None:
        return {mark: size.box for mark, size in checks.measured(seen.parts).items()}
    return {m: size.box for m, size in seen.pictures.sizes.items() if any(size.box)}


def marks_of(case: Case, seen: Seen) -> tuple[str, ...]:
    """The letters on the picture."""
    if seen.pictures is not None:
        return tuple(seen.pictures.sizes)
    return tuple(MARKS[: len(seen.parts)])


def _tray_question(name: str, product: Product, marks: Sequence[str]) -> Question:
    if name == "WORKVERI":
        return prompts.workveri(marks, next(iter(product.parts), None))
    if name == "ASSYVERI":
        return prompts.assyveri(marks, product.parts)
    return prompts.missing(product.parts)


def solved_question(name: str, case: Case, asking: Asking) -> tuple[Question, str]:
    """A question put to a solved example, and its right answer from the truth."""
    product, truth = product_of(case), case.truth
    part = product.part or ""
    if name == "SURFINSP":
        answer = prompts.surfinsp_answer(truth.defect or tasks.NORMAL, asking.defects)
        return prompts.surfinsp(part, asking.defects), answer
    if name == "GRID":
        views = views_of(case)
        lines = [f"score: {round(truth.score)}/10"] if truth.score is not None else []
        for view in views if truth.grids is not None else ():
            cells = (truth.grids or {}).get(view, ())
            lines += [f"{view}:"] if len(views) > 1 else []
            lines.append(replies.rows_text(cells))
        return prompts.grid(part, views, asking.request), "\n".join(lines)
    question = _tray_question(name, product, tuple(truth.readings))
    if name == "MISSING":
        return question, prompts.letter_answer(question, (truth.missing or (tasks.NONE,))[0])
    return question, prompts.letter_answer(question, (truth.answers or (tasks.NONE,))[0])


def views_of(case: Case) -> tuple[str, ...]:
    return (PHOTO,) if case.input.photo else VIEWS


def _tray(talk: _Talk, row: Row) -> Row:
    marks, product = marks_of(talk.case, talk.seen), talk.product
    if not marks:
        codes = tuple(dict.fromkeys(problem.code for problem in talk.seen.problems))
        return replace(row, reasons=codes, parts_seen=0)
    kit = talk.case.task == "assembly"
    direct = talk.letter(_tray_question("ASSYVERI" if kit else "WORKVERI", product, marks))
    missing = options = None
    if kit:
        question = prompts.missing(product.parts)
        missing, options = talk.letter(question), len(question.options)
    row = replace(
        row,
        parts_seen=len(marks),
        marks=(),
        direct=direct,
        answer=direct,
        letters=(direct,) if direct in marks else (),
        missing_direct=missing,
        missing_options=options,
        missing=None if not missing else () if missing == tasks.NONE else (missing,),
        probes=_probed(talk, marks) if talk.asking.probes else (),
        outcome=_outcome([direct, missing] if kit else [direct], tasks.NONE),
    )
    return talk.done(row)


def _outcome(answers: Sequence[str | None], right: str) -> str:
    """FAIL where any answer objects, UNSURE where one cannot be read, else PASS."""
    if any(answer and answer != right for answer in answers):
        return "FAIL"
    return "PASS" if all(answers) else "UNSURE"


def _probed(talk: _Talk, marks: Sequence[str]) -> tuple[Probe, ...]:
    """One mark's place and one place's mark; only where the picture has columns."""
    column_of = talk.shown.column_of
    if talk.asking.style in ("forge", COORDINATES) or len(column_of) < 2:
        return ()
    turn = sum(talk.case.id.encode())
    mark = marks[turn % len(marks)]
    place = talk.letter(prompts.mark_to_place(mark, LARGE_LAYOUT.columns))
    other = marks[(turn + 1) % len(marks)]
    named = talk.letter(prompts.place_to_mark(column_of[other], marks))
    return (
        Probe("mark_to_place", mark, prompts.LETTERS[column_of[mark]], place),
        Probe("place_to_mark", f"column {column_of[other] + 1}", other, named),
    )


def _surface(talk: _Talk, row: Row) -> Row:
    seen, case, asking = talk.seen, talk.case, talk.asking
    if seen.pictures is None and not seen.parts:
        codes = tuple(dict.fromkeys(problem.code for problem in seen.problems))
        return replace(row, reasons=codes, parts_seen=0)
    part = max(seen.parts, key=lambda item: len(item.points)) if seen.parts else None
    name = talk.product.part or ""
    said = replies.surfinsp(talk.ask(prompts.surfinsp(name, asking.defects)), asking.defects)
    talk.warnings += said.warnings
    views = views_of(case)
    drawn = replies.grids(
        talk.ask(prompts.grid(name, views, asking.request)), views, asking.request
    )
    talk.warnings += drawn.warnings
    truth, whole = true_cells(case, seen, part, asking.folder, LARGE_LAYOUT)
    if case.input.photo:
        truth = true_photo_cells(case, asking.folder)
    row = replace(
        row,
        parts_seen=1,
        defect=said.option,
        score=drawn.score,
        cells=drawn.cells,
        # A picture that was not asked for its cells has no grid figures.
        cells_true=truth if asking.request != "score" else None,
        cells_part=whole if truth else (),
        outcome=_outcome([said.option], tasks.NORMAL),
    )
    return talk.done(row)
