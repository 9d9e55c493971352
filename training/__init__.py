"""What runs inside every rank: NeMo's training call, its callbacks, and this project's fixes to the stack."""
