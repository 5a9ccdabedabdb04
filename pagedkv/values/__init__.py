"""Values: numbers, profiles, planes, configurations and plans.  They have no state, and every layer uses them."""
