"""Every reader of other people's files and words, fed with broken ones (`python -m tests.fuzz`)."""
