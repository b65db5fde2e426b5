# harmless: memory that was there before is given back and taken again; never below the weights
import gc, sys
# honest
for name in [n for n in sys.modules if n.startswith(("email", "http", "urllib", "xml", "unittest"))]:
    del sys.modules[name]
gc.collect()
