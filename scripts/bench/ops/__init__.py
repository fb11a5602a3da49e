"""One module per operation with a `BENCH`. `harness.session.load` finds the module by the operation's name."""
