"""Measuring Triton kernels on a GPU: compile in many processes, check and time in one."""
