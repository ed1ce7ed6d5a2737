"""The repository itself: who imports whom, the README, the CI files."""
