"""The steps of a call, as data: formulas of sizes, numbers, memory, launches. Needs neither graphs nor sympy; can be saved."""
