"""From a row to a record: guarded memory, a worker that runs the program, the comparison and the evidence."""
