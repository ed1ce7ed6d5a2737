"""From a row to a record: guarded memory, the workers that run programs, the verdict and its evidence."""
