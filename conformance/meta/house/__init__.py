"""The house itself: who imports whom, the README, the CI files."""
