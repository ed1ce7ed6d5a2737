"""What an H200 answered, and the tests that hold the machine to it."""
