"""Records in the formats of others: flashinfer-bench, JUnit. Knows those formats and lines, no policy of the gate."""
