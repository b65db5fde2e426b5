"""`python -m tools.loops` names the loops that keep their sums in memory, and no others."""

from __future__ import annotations

from tools.loops import suspects

IN_REGISTERS = """
0000000000001080 <tw::tile<8, 2>(long)>:
{}
    10f8:\tvmovdqa32 %zmm3,0x88(%rsp)
"""
ADD = "    1084:\tvpdpbusd %zmm2,%zmm4,%zmm3"
STORE = "    1088:\tvmovdqa32 %zmm3,-0x{}(%rsp)"


def test_a_loop_in_registers_is_passed_over() -> None:
    assert not list(suspects(IN_REGISTERS.format("\n".join([ADD] * 16)).splitlines()))


def test_a_loop_in_memory_is_named() -> None:
    body = "\n".join(f"{ADD}\n{STORE.format(8 * i)}" for i in range(16))
    assert list(suspects(IN_REGISTERS.format(body).splitlines())) == [("tw::tile<8, 2>(long)", 16, 16)]


def test_a_store_of_something_else_is_no_sum() -> None:
    other = STORE.format(8).replace("%zmm3", "%zmm9")
    assert not list(suspects(IN_REGISTERS.format(f"{ADD}\n{other}\n" * 16).splitlines()))
