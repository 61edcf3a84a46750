"""CRC-32 of joined data from the CRCs of its parts.

zlib's method: a CRC is a polynomial over GF(2) modulo P; appending n zero bytes multiplies by x^(8n), and
CRC(A B) = CRC(A) x^(8 len B) + CRC(B).
"""

from __future__ import annotations

_P = 0xEDB88320  # the CRC-32 polynomial, bits reversed: bit 31 is x^0


def combine(first: int, second: int, second_length: int) -> int:
    """zlib.crc32(A + B) from zlib.crc32(A), zlib.crc32(B) and len(B)."""
    return _multiply(_power_of_x(8 * second_length), first) ^ second


def _multiply(a: int, b: int) -> int:
    """a(x) b(x) mod P."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_P if b & 1 else 0)
    return product


def _power_of_x(n: int) -> int:
    """x^n mod P, by squaring."""
    result, square = 1 << 31, 1 << 30
    while n:
        if n & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        n >>= 1
    return result
