"""Laws for kernels of every op: a new op has them as soon as its spec names them."""

from __future__ import annotations

from conformance.kernels.laws.agreement import same_bits
from conformance.kernels.laws.law import EVERY_OP, Axes, Bench, BrokenLawError, inputs_of, law
from megamoe.contract import Case, UnsupportedError
from megamoe.judge.judge import judge


@law(EVERY_OP, "tolerance")
def matches_reference(bench: Bench, case: Case) -> None:
    """A kernel's outputs match the float64 oracle.

    Within the spec's tolerance, whose reasons the spec gives. megamoe.judge.judge decides, as for a row of the matrix.
    """
    bench.last = bench.machine.row(case, bench.schedule)
    record = judge(bench.last, run="property")
    sentence = record.sentence.partition(". Rerun:")[0]
    if record.status == "unsupported":
        raise UnsupportedError(sentence)
    if record.status != "passed":
        raise BrokenLawError(f"{case.id} {record.status}: {sentence}")


def _under_each_schedule(axes: Axes) -> list[Axes]:
    return [axes] * 3


@law(EVERY_OP, "bitwise", runs=_under_each_schedule, schedules=3)
def schedule_independent(bench: Bench, case: Case) -> None:
    """The outputs do not depend on the order in which the machine completes asynchronous work.

    Bitwise: waits order all the arithmetic of a correct kernel. If a schedule changes a bit, there is a race.
    """
    inputs = inputs_of(case)
    first = bench.run(case, inputs)
    for schedule in bench.schedules[1:]:
        again = bench.run(case, inputs, schedule)
        same_bits(case, again, first, (f"under {schedule}", f"under {bench.schedule}"))


@law(EVERY_OP, "bitwise", runs=lambda axes: [axes, axes])
def bitwise_repeatable(bench: Bench, case: Case) -> None:
    """Running the same case twice gives the same outputs.

    Bitwise: inputs and schedule are the same. A difference comes from unwritten memory or from a race.
    """
    inputs = inputs_of(case)
    first = bench.run(case, inputs)
    same_bits(case, bench.run(case, inputs), first, ("the second time", "the first time"))
