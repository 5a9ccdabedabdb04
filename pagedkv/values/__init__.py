"""Values: what everything else is told.  Numbers, profiles, planes, configuration and plans; no state."""
