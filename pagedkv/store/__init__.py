"""The store: the object a caller holds, who may call it, what it does on the device, and how it opens."""
