"""How plans are chosen: pure functions of sizes and targets, one file a kind."""
