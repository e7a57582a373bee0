"""The numbers of mathvalue (pure): exact Gaussian rationals, and complex decimals of 60 digits with a bound on their error.

What would take more than MAX_BITS is TooLarge; what has no value is NoExpression, or an error of the decimal module that
`mathvalue.evaluate` turns into one. Everything here runs in the decimal context CONTEXT.
"""

from __future__ import annotations

import math
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, DivisionByZero, InvalidOperation, Overflow
from fractions import Fraction
from typing import NamedTuple, cast

from actors.reward.mathexpr import NoExpression, TooLarge

MAX_BITS = 4096  # of an exact numerator or denominator
MAX_ANGLE = 10**6
MAX_EXPONENT = 10_000  # of ten, and of e
MAX_ROOT = 16  # of the index
_DIGITS = 60
CONTEXT = Context(prec=_DIGITS, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[DivisionByZero, InvalidOperation, Overflow])
ROUNDING = Decimal(10) ** (2 - _DIGITS)  # of one operation, relative
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620900")
_BLURRED = Decimal(10) ** -25  # an error above this, relative, tells nothing
_SURE = 4  # a value is told from zero when it is this many times its error
_NONE = Decimal(0)


class Value(NamedTuple):
    """A complex number. Exact (both parts are fractions) where `error` is None; else both are decimals, within `error`."""

    re: Fraction | Decimal
    im: Fraction | Decimal = Fraction(0)
    error: Decimal | None = None

    @property
    def exact(self) -> bool:
        return self.error is None

    @property
    def real(self) -> bool:
        """Whether the imaginary part is zero, as far as is known."""
        return self.im == 0 or (self.error is not None and abs(decimals(self)[1]) <= self.error)


ZERO, ONE, TWO, IMAGINARY = Value(Fraction(0)), Value(Fraction(1)), Value(Fraction(2)), Value(Fraction(0), Fraction(1))


def fractions(value: Value) -> tuple[Fraction, Fraction]:
    """Both parts of an exact value."""
    return cast("tuple[Fraction, Fraction]", value[:2])


def decimals(value: Value) -> tuple[Decimal, Decimal, Decimal]:
    """Both parts and their error, rounded where the value is exact."""
    if value.error is not None:
        return cast("tuple[Decimal, Decimal, Decimal]", tuple(value))
    re, im = (Decimal(part.numerator) / Decimal(part.denominator) for part in fractions(value))
    return re, im, max(abs(re), abs(im)) * ROUNDING


def bits(value: Value) -> int:
    """Of the largest integer in an exact value; 0 for others."""
    parts = fractions(value) if value.exact else ()
    return max((max(part.numerator.bit_length(), part.denominator.bit_length()) for part in parts), default=0)


def bounded(value: Value) -> Value:
    """The value itself; TooLarge where it takes too many digits, or where too few of them are known."""
    if value.exact:
        if bits(value) > MAX_BITS:
            raise TooLarge("too large")
        return value
    re, im, error = decimals(value)
    most = max(abs(re), abs(im))
    if most and abs(most.adjusted()) > MAX_EXPONENT:
        raise TooLarge("too large")
    if error > _BLURRED * most and error > _BLURRED:
        raise TooLarge("takes more digits than are kept")
    return value


def rounded(re: Decimal, im: Decimal, error: Decimal) -> Value:
    """A value just computed: its last digit is uncertain, too."""
    return Value(re, im, error + max(abs(re), abs(im)) * ROUNDING)


def neg(value: Value) -> Value:
    return Value(-value.re, -value.im, value.error)


def plus(left: Value, right: Value) -> Value:
    if left.exact and right.exact:
        (a, b), (c, d) = fractions(left), fractions(right)
        return Value(a + c, b + d)
    p, q, e = decimals(left)
    r, s, f = decimals(right)
    return rounded(p + r, q + s, e + f)


def minus(left: Value, right: Value) -> Value:
    return plus(left, neg(right))


def times(left: Value, right: Value) -> Value:
    if ZERO in (left, right):
        return ZERO
    if left.exact and right.exact:
        (a, b), (c, d) = fractions(left), fractions(right)
        return Value(a * c - b * d, a * d + b * c)
    p, q, e = decimals(left)
    r, s, f = decimals(right)
    x, y = abs(p) + abs(q), abs(r) + abs(s)
    return rounded(p * r - q * s, p * s + q * r, x * f + y * e + e * f + x * y * ROUNDING)


def over(left: Value, right: Value) -> Value:
    if right.exact:
        a, b = fractions(right)
        return times(left, Value(a / (a * a + b * b), -b / (a * a + b * b)))
    p, q, e = decimals(right)
    if max(abs(p), abs(q)) <= _SURE * e:
        raise NoExpression("division by zero")
    square = p * p + q * q
    return times(left, rounded(p / square, -q / square, 2 * e / square))


def whole(value: Value) -> int | None:
    """An exact whole number; None for any other."""
    re, im = value.re, value.im
    return re.numerator if isinstance(re, Fraction) and re.denominator == 1 and im == 0 else None


def _count(value: Value, most: int) -> int:
    """For factorials and binomials: a small whole number."""
    n = whole(value)
    if n is None or n < 0:
        raise NoExpression("not a count")
    if n > most:
        raise TooLarge("too large")
    return n


def factorial(value: Value) -> Value:
    return Value(Fraction(math.factorial(_count(value, MAX_BITS // 8))))


def binom(top: Value, low: Value) -> Value:
    return Value(Fraction(math.comb(_count(top, MAX_BITS), _count(low, MAX_BITS))))


def power(base: Value, exponent: Value) -> Value:
    if (n := whole(exponent)) is not None:
        return _whole_power(base, n)
    top = exponent.re
    if isinstance(top, Fraction) and exponent.im == 0 and top.denominator <= MAX_ROOT:
        return _whole_power(root(Value(Fraction(top.denominator)), base), top.numerator)
    return exp(times(exponent, ln(base)))


def _whole_power(base: Value, n: int) -> Value:
    if base.exact:
        re, im = fractions(base)
        if im == 0 and abs(re) in (0, 1):
            return Value(re ** (n % 2 if re else n))
        if re == 0 and abs(im) == 1:
            n %= 4
        if abs(n) * bits(base) > MAX_BITS:
            raise TooLarge("too large")
        if im == 0:
            return Value(re**n)
    elif abs(n) > MAX_BITS:
        raise TooLarge("too large")
    found, square, left = ONE, base, abs(n)
    while left:
        found = bounded(times(found, square)) if left & 1 else found
        left >>= 1
        square = bounded(times(square, square)) if left else square
    return over(ONE, found) if n < 0 else found


def root(index: Value, value: Value) -> Value:
    """Of a real number the real root where there is one, else the principal square root."""
    n = whole(index)
    if n is None or not 2 <= n <= MAX_ROOT:
        raise NoExpression("such a root is not read")
    if not value.real:
        if n != 2:
            raise NoExpression("root of a complex number")
        return _complex_root(value)
    found = _real_root(value, n)
    if value.re >= 0:
        return found
    if n % 2:
        return neg(found)
    if n != 2:
        raise NoExpression("even root of a negative number")
    return times(IMAGINARY, found)


def _real_root(value: Value, n: int) -> Value:
    """Of the size of a real number."""
    if value.exact:
        size = abs(fractions(value)[0])
        top, low = _integer_root(size.numerator, n), _integer_root(size.denominator, n)
        if top is not None and low is not None:
            return Value(Fraction(top, low))
    re, _, error = decimals(value)
    size_of = abs(re)
    if size_of <= _SURE * error:  # zero, as far as is known
        return Value(_NONE, _NONE, ((2 * _SURE * error).ln() / n).exp() if error else _NONE)
    found = size_of.sqrt() if n == 2 else (size_of.ln() / n).exp()
    return rounded(found, _NONE, found * (error / size_of + (abs(size_of.adjusted()) + 1) * 4 * ROUNDING))


def _complex_root(value: Value) -> Value:
    half, real = Value(Fraction(1, 2)), Value(value.re, value.re * 0, value.error)
    re = root(TWO, times(half, plus(size(value), real)))
    return plus(re, times(IMAGINARY, over(times(half, Value(value.im, value.im * 0, value.error)), re)))


def _integer_root(value: int, n: int) -> int | None:
    """The n-th root when it is whole (Newton's iteration on integers)."""
    if value < 2:
        return value
    guess = 1 << -(-value.bit_length() // n)
    while True:
        better = ((n - 1) * guess + value // guess ** (n - 1)) // n
        if better >= guess:
            return guess if guess**n == value else None
        guess = better


def size(value: Value) -> Value:
    """Absolute value."""
    if value.real:
        return Value(value.re if value.re >= 0 else -value.re, value.re * 0, value.error)
    parts = [Value(part, part * 0, value.error) for part in (value.re, value.im)]
    return root(TWO, plus(*(times(part, part) for part in parts)))


def real_part(value: Value) -> tuple[Decimal, Decimal]:
    """A real number and its error; NoExpression for others."""
    if not value.real:
        raise NoExpression("of a real number only")
    re, _, error = decimals(value)
    return re, error


def ln(value: Value) -> Value:
    if value == ONE:
        return ZERO
    x, error = real_part(value)
    if x <= _SURE * error:
        raise NoExpression("logarithm of what is not positive")
    return rounded(x.ln(), _NONE, error / x)


def log(base: Value, value: Value) -> Value:
    return over(ln(value), ln(base))


def exp(value: Value) -> Value:
    x, y, error = decimals(value)
    if abs(x) > MAX_EXPONENT:
        raise TooLarge("too large")
    grown = x.exp()
    found = rounded(grown, _NONE, grown * 2 * error)
    return times(found, Value(*circle(y, error))) if y else found


def circle(angle: Decimal, error: Decimal) -> tuple[Decimal, Decimal, Decimal]:
    """Cosine, sine and their error, by Taylor's series at the angle less whole turns."""
    if abs(angle) > MAX_ANGLE:
        raise TooLarge("too large an angle")
    x = angle - (angle / (2 * PI)).to_integral_value() * 2 * PI
    sums = [_NONE, _NONE]
    term, n = Decimal(1), 0
    while n < 2 or abs(term) > ROUNDING:
        sums[n % 2] += term if n % 4 < 2 else -term
        n += 1
        term = term * x / n
    return sums[0], sums[1], error + (abs(angle) + 1) * 4 * ROUNDING + n * ROUNDING
