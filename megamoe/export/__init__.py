"""Records in other people's formats: flashinfer-bench, JUnit."""
