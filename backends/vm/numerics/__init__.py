"""GPU arithmetic as pure functions on NumPy arrays of any shape, without state of the virtual machine.

f32 and f64 arithmetic takes and returns float arrays. Half precision and conversions take and return bit patterns in
unsigned arrays. Division by zero, overflow and NaN are results here, not warnings: the interpreter runs under
`np.errstate(all="ignore")`, entered once, because entering it per instruction costs as much as the instruction.
"""
