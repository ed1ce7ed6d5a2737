"""Records in the formats of others: flashinfer-bench, JUnit; knows those formats and lines, no policy."""
