"""What a call does, as data: formulas of sizes, numbers, memory, launches. Knows neither graphs nor sympy; can be written down."""
