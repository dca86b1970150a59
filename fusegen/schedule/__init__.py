"""Groups to programs: the math over fragments, the plan of each kernel, and the steps of a call."""
