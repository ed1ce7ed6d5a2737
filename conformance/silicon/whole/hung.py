"""Why random programs hang or end in an illegal instruction, by their SASS: `.. hung PTXAS NVDISASM [NUMBER ..]`.

`python -m conformance.silicon.whole.hung ptxas nvdisasm` checks all programs of drawn.npz that failed on the H200.
Assembled at the level that they were drawn for, all but two show one of two faults of ptxas 13.0. The SASS of these two
(ENDED) suggested a change of their text that makes them end. None was drawn for -O0.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from conformance.silicon.whole.drawn import FUNCTIONS, HEAD, drawn
from conformance.silicon.whole.merge import DRAWN, DrawnAnswers
from conformance.silicon.whole.on_device import level_of

UNIFORM_COUNTER: Final = "a uniform register counts the turns of a loop that lanes take at different times"
BARRIER_TWICE: Final = "a bar.red is done again, in an arm that reads its result"
SHUFFLED_AGAIN: Final = "a shfl.sync is done again in each turn of a loop, which lanes leave at different turns"
TAKEN_FOR_UNIFORM: Final = (
    "a matrix that movmatrix transposed is taken for the same in all lanes, and counts their turns"
)


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that ends on the H200 with `keeps` inserted after `behind`, and then leaves the -O0 result: `left`.

    `keeps` stores a value to shared memory that nothing else uses and loads it back, so that ptxas cannot know it.
    """

    cause: str
    behind: str
    keeps: str
    left: int

    def changed(self, text: str) -> str:
        """Returns the changed text. ValueError unless `behind` occurs exactly once."""
        if text.count(self.behind) != 1:
            raise ValueError(
                f"{self.behind!r} stands {text.count(self.behind)} times in the text, where it should once"
            )
        return text.replace(self.behind, f"{self.behind} {self.keeps}")


_OWN_WORD = "shl.b32 %t1, %tx, 2; mov.u32 %t2, tile; add.u32 %t1, %t1, %t2;"
ENDED: Final = {
    42668: Ended(
        TAKEN_FOR_UNIFORM,
        "movmatrix.sync.aligned.m8n8.trans.b16 %r5, %r10;",
        f"{_OWN_WORD} st.volatile.shared.u32 [%t1], %r5; ld.volatile.shared.u32 %r5, [%t1];",
        0xF0396F3B84E165E,
    ),
    88238: Ended(
        SHUFFLED_AGAIN,
        "shfl.sync.down.b32 %r6|%p1, %r11, 29, 31, 0xFFFFFFFF;",
        f"{_OWN_WORD} selp.b32 %t0, 1, 0, %p1; st.volatile.shared.u32 [%t1], %t0; ld.volatile.shared.u32 %t0, [%t1]; "
        "setp.ne.u32 %p1, %t0, 0;",
        0xE0FE52E871842E54,
    ),
}
"""By program number. The hashes are an H200's (results/records/h200-hung.json)."""
_LABEL = re.compile(r"(\.L_x_\d+):")
_BACK = re.compile(r"\bBRA `\((\.L_x_\d+)\)")
_COUNTS = re.compile(r"UIADD3 (UR\d+), \1, -0x1")


def counts_uniformly(sass: str) -> bool:
    """Whether a loop shares its back edge with the retries of an atomic operation (ATOMS.CAST.SPIN).

    Lanes leave the retries at different iterations and do not reconverge before the counter of the outer loop, which is
    one register for the whole warp: it is decremented once for each group of lanes, and passes zero.
    """
    lines = [line.strip() for line in sass.splitlines()]
    labels = {one[1]: at for at, line in enumerate(lines) if (one := _LABEL.match(line))}
    for at, line in enumerate(lines):
        back = _BACK.search(line)
        if back and labels.get(back[1], at) < at:
            turn = "\n".join(lines[labels[back[1]] : at])
            if ".SPIN" in turn and _COUNTS.search(turn):
                return True
    return False


def barriers_twice(ptx: str, sass: str) -> bool:
    """Whether there are more BAR.RED than bar.red: warps that skip the branch do not reach the second one."""
    return sass.count("BAR.RED") > len(re.findall(r"\bbar\.red", ptx))


def causes(ptx: str, sass: str) -> list[str]:
    """Returns all causes found. An unrolled loop also has more barriers than its text."""
    found = [(counts_uniformly(sass), UNIFORM_COUNTER), (barriers_twice(ptx, sass), BARRIER_TWICE)]
    return [cause for there, cause in found if there]


def sass_of(number: int, ptxas: str, nvdisasm: str) -> str:
    """Assembles and disassembles a program. CalledProcessError if a tool refuses."""
    with TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "drawn.ptx", Path(folder) / "drawn.cubin"
        source.write_text(HEAD + FUNCTIONS + drawn(number).text, "utf-8")
        subprocess.run([ptxas, level_of(number), "-arch=sm_90a", "-o", str(cubin), str(source)], check=True)
        return subprocess.run([nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True).stdout


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; see the module."""
    ptxas, nvdisasm, *numbers = arguments
    asked = [int(one) for one in numbers] or sorted(DrawnAnswers.read(DRAWN).failed)
    counted: Counter[tuple[str, str]] = Counter()
    for number in asked:
        found = causes(drawn(number).text, sass_of(number, ptxas, nvdisasm))
        ended = ENDED.get(number)
        cause = found[0] if found else ended.cause if ended else "no cause is known"
        counted[level_of(number), cause] += 1
        print(f"{number} ({level_of(number)}): {cause}", flush=True)
    for (level, cause), count in sorted(counted.items()):
        print(f"{count} under {level}: {cause}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
