"""Where fusegen meets models, graphs and packages of others."""
