"""Looking for a case on which a machine breaks a law."""

from __future__ import annotations

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from conformance.kernels.laws.law import Law, Machine
from conformance.kernels.laws.trial import Tally, conduct, trials

EXAMPLES = 40
hunting = settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
# Draws vary with the constants that Hypothesis finds in loaded modules; a planted fault ends the search when it is met.
searching = settings(hunting, max_examples=10 * EXAMPLES)


def hunt(law: Law, machine: Machine, how: settings = hunting) -> Tally:
    """Tries `law` on drawn cases; raises BrokenLawError when it is broken."""
    tally = Tally()

    @how
    @given(data=st.data())
    def hunted(data: st.DataObject) -> None:
        conduct(law, machine, data.draw(trials(law, None, [])), tally)

    hunted()
    return tally
