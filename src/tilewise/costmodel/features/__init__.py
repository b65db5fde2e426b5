"""From a kernel's raw numbers to what each model reads."""
