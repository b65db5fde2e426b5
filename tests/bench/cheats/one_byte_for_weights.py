# refused with weights.bin: cannot be read|No such file|is not there|weights
# honest
