"""Values of expressions (pure): exact Gaussian rationals, and complex decimals of 60 digits with a bound on their error where a
root, a logarithm or a sine is not rational.

Letters have fixed values (Schwartz-Zippel: an identity of polynomials that is false survives one point with probability <
degree / 1000). Two values are told apart exactly, or as far as their error bounds reach: `1.41421356237309` is not the root of two.
Work is bounded: what would take more than MAX_BITS is TooLarge.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, DivisionByZero, InvalidOperation, Overflow, localcontext
from fractions import Fraction
from typing import NamedTuple

from actors.reward.mathexpr import NoExpression, Node, TooLarge

MAX_BITS = 4096  # of an exact numerator or denominator
POINTS = 3
BELOW_ZERO = POINTS  # one more point, whose letters are negative, for |x|
MAX_ANGLE = 10**6
MAX_EXPONENT = 10_000  # of ten, and of e
APPROXIMATION_BITS = 128  # a constant rational that takes more digits is nobody's exact value of a root
_DIGITS = 60
_CONTEXT = Context(prec=_DIGITS, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[DivisionByZero, InvalidOperation, Overflow])
_ROUNDING = Decimal(10) ** (2 - _DIGITS)  # of one operation, relative
_BLURRED = Decimal(10) ** -25  # an error above this, relative, tells nothing
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620900")
_ZERO = Fraction(0)

Part = Fraction | Decimal


class Value(NamedTuple):
    """A complex number. Exact (both parts are fractions) where `error` is None; else decimals, each within `error`."""

    re: Part
    im: Part = _ZERO
    error: Decimal | None = None

    @property
    def exact(self) -> bool:
        return self.error is None

    @property
    def real(self) -> bool:
        """Whether the imaginary part is zero, as far as is known."""
        return self.im == 0 or (self.error is not None and abs(self.im) <= self.error)


def evaluate(node: Node, point: int, log_base: int = 10) -> Value:
    """The value where every letter has its fixed value number `point`. `log_base` is that of a bare \\log, 0 = e. Raises
    NoExpression where there is none, TooLarge where it takes too much work."""
    with localcontext(_CONTEXT):
        try:
            return _evaluate(node, point, log_base)
        except (ZeroDivisionError, DivisionByZero, InvalidOperation) as error:
            raise NoExpression("no value") from error
        except (OverflowError, Overflow) as error:
            raise TooLarge("too large") from error


def same(left: Value, right: Value, constant: bool) -> bool:
    """Whether two values are equal as far as they are known. `constant`: no letter is in them."""
    if left.exact and right.exact:
        return left[:2] == right[:2]
    with localcontext(_CONTEXT):
        for one in (left, right) if constant else ():
            if one.exact and max(_bits(one.re), _bits(one.im)) > APPROXIMATION_BITS:
                return False
        gap = _minus(left, right)
        return max(abs(gap.re), abs(gap.im)) <= 4 * (gap.error or 0)


def ratio(left: Value, right: Value) -> Value | None:
    """left / right; None where right is zero."""
    with localcontext(_CONTEXT):
        try:
            return _over(left, right)
        except (ZeroDivisionError, DivisionByZero, InvalidOperation, NoExpression):
            return None


def _evaluate(node: Node, point: int, log_base: int) -> Value:
    """Long sums and products hang to the left: those are walked in a loop, only brackets are recursion."""
    spine: list[Node] = []
    while node.kind in ("+", "*", "/", "frac"):
        spine.append(node)
        node = node.args[0]
    value = _operand(node, point, log_base)
    for above in reversed(spine):
        value = _bounded(_OPERATIONS[above.kind](value, _evaluate(above.args[1], point, log_base)))
    return value


def _operand(node: Node, point: int, log_base: int) -> Value:
    match node.kind:
        case "number":
            return Value(node.number)
        case "symbol":
            return _symbol(node.name, point)
        case "log" if len(node.args) == 1:
            base = Value(Fraction(10)) if log_base else _symbol("e", 0)
            return _log(base, _evaluate(node.args[0], point, log_base))
    args = [_evaluate(arg, point, log_base) for arg in node.args]
    found = _OPERATIONS[node.kind](*args) if node.kind != "function" else _function(node.name, args[0])
    return _bounded(found)


def _symbol(name: str, point: int) -> Value:
    if name == "i":
        return Value(_ZERO, Fraction(1))
    if name in ("\\pi", "e"):
        value = +_PI if name == "\\pi" else Decimal(1).exp()
        return Value(value, Decimal(0), value * _ROUNDING)
    mixed = zlib.crc32(f"{point}/{name}".encode())
    value = Fraction(mixed % 1009 + 2, (mixed >> 16) % 31 + 3)
    return Value(-value if point == BELOW_ZERO else value)


def _bits(value: Part) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length()) if isinstance(value, Fraction) else 0


def _bounded(value: Value) -> Value:
    if value.error is None:
        if max(_bits(value.re), _bits(value.im)) > MAX_BITS:
            raise TooLarge("too large")
        return value
    most = max(abs(value.re), abs(value.im))
    if most and abs(Decimal(most).adjusted()) > MAX_EXPONENT:
        raise TooLarge("too large")
    if value.error > _BLURRED * most and value.error > _BLURRED:
        raise TooLarge("takes more digits than are kept")
    return value


def _decimal(part: Part) -> Decimal:
    return part if isinstance(part, Decimal) else Decimal(part.numerator) / Decimal(part.denominator)


def _blur(value: Value) -> Value:
    """The same with decimals."""
    if value.error is not None:
        return value
    re, im = _decimal(value.re), _decimal(value.im)
    return Value(re, im, max(abs(re), abs(im)) * _ROUNDING)


def _known(re: Decimal, im: Decimal, error: Decimal) -> Value:
    return Value(re, im, error + max(abs(re), abs(im)) * _ROUNDING)


def _neg(value: Value) -> Value:
    return Value(-value.re, -value.im, value.error)


def _plus(left: Value, right: Value) -> Value:
    if left.error is None and right.error is None:
        return Value(left.re + right.re, left.im + right.im)  # type: ignore[operator]
    a, b = _blur(left), _blur(right)
    return _known(_decimal(a.re) + _decimal(b.re), _decimal(a.im) + _decimal(b.im), (a.error or 0) + (b.error or Decimal(0)))


def _minus(left: Value, right: Value) -> Value:
    return _plus(left, _neg(right))


def _size(value: Value) -> Decimal:
    return abs(_decimal(value.re)) + abs(_decimal(value.im))


def _times(left: Value, right: Value) -> Value:
    if left == Value(_ZERO) or right == Value(_ZERO):
        return Value(_ZERO)
    if left.error is None and right.error is None:
        (a, b, _), (c, d, _) = left, right
        return Value(a * c - b * d, a * d + b * c)  # type: ignore[operator]
    x, y = _blur(left), _blur(right)
    a, b, c, d = _decimal(x.re), _decimal(x.im), _decimal(y.re), _decimal(y.im)
    e, f = x.error or Decimal(0), y.error or Decimal(0)
    return _known(a * c - b * d, a * d + b * c, _size(x) * f + _size(y) * e + e * f + _size(x) * _size(y) * _ROUNDING)


def _over(left: Value, right: Value) -> Value:
    if right.error is None:
        square = right.re * right.re + right.im * right.im  # type: ignore[operator]
        return _times(left, Value(right.re / square, -right.im / square))  # type: ignore[operator]
    a, b, e = _decimal(right.re), _decimal(right.im), right.error
    if max(abs(a), abs(b)) <= 4 * e:
        raise NoExpression("division by zero")
    square = a * a + b * b
    return _times(left, _known(a / square, -b / square, 2 * e / square))


def _count(value: Value, most: int) -> int:
    """For factorials and binomials: a small whole number."""
    if not value.exact or value.im or not isinstance(value.re, Fraction) or value.re.denominator != 1 or value.re < 0:
        raise NoExpression("not a count")
    if value.re > most:
        raise TooLarge("too large")
    return value.re.numerator


def _factorial(value: Value) -> Value:
    return Value(Fraction(math.factorial(_count(value, MAX_BITS // 8))))


def _binom(top: Value, low: Value) -> Value:
    return Value(Fraction(math.comb(_count(top, MAX_BITS), _count(low, MAX_BITS))))


def _whole(value: Value) -> int | None:
    ok = value.exact and value.im == 0 and isinstance(value.re, Fraction) and value.re.denominator == 1
    return int(value.re) if ok else None


def _power(base: Value, exponent: Value) -> Value:
    n = _whole(exponent)
    if n is not None:
        return _whole_power(base, n)
    if exponent.exact and exponent.im == 0 and isinstance(exponent.re, Fraction) and exponent.re.denominator <= 16:
        return _whole_power(_root(Value(Fraction(exponent.re.denominator)), base), exponent.re.numerator)
    return _exp(_times(exponent, _ln(base)))


def _whole_power(base: Value, n: int) -> Value:
    if base.exact:
        if abs(n) * max(_bits(base.re), _bits(base.im)) > MAX_BITS and _size(base) not in (0, 1):
            raise TooLarge("too large")
        n = n if base.im == 0 or _size(base) > 1 else n % 4  # powers of i
        if base.im == 0:
            return Value(base.re**n)  # type: ignore[arg-type]
    elif abs(n) > MAX_BITS:
        raise TooLarge("too large")
    found, square, left = Value(Fraction(1)), base, abs(n)
    while left:
        found = _bounded(_times(found, square)) if left & 1 else found
        left >>= 1
        square = _bounded(_times(square, square)) if left else square
    return _over(Value(Fraction(1)), found) if n < 0 else found


def _root(index: Value, value: Value) -> Value:
    """Of a real number the real root where there is one, else the principal square root."""
    n = _whole(index)
    if n is None or not 2 <= n <= 16:
        raise NoExpression("such a root is not read")
    if not value.real:
        if n != 2:
            raise NoExpression("root of a complex number")
        return _complex_root(value)
    if value.exact and isinstance(value.re, Fraction):
        below, size = value.re < 0, abs(value.re)
        top, low = _whole_root(size.numerator, n), _whole_root(size.denominator, n)
        if top is not None and low is not None:
            found = Value(Fraction(top, low))
        else:
            found = _real_root(_decimal(size), _decimal(size) * _ROUNDING, n)
    else:
        blurred = _decimal(value.re)
        below = blurred < 0
        found = _real_root(abs(blurred), value.error or Decimal(0), n)
    if not below:
        return found
    if n % 2:
        return _neg(found)
    if n != 2:
        raise NoExpression("even root of a negative number")
    return _times(Value(_ZERO, Fraction(1)), found)


def _real_root(value: Decimal, error: Decimal, n: int) -> Value:
    if value <= 4 * error:
        return Value(Decimal(0), Decimal(0), _real_root(16 * error, Decimal(0), n).re if error else Decimal(0))  # type: ignore[arg-type]
    found = value.sqrt() if n == 2 else (value.ln() / n).exp()
    return _known(found, Decimal(0), found * (error / value + (abs(value.adjusted()) + 1) * 4 * _ROUNDING))


def _complex_root(value: Value) -> Value:
    size = _abs(value)
    half = Value(Fraction(1, 2))
    re = _root(Value(Fraction(2)), _times(half, _plus(size, Value(value.re, value.im * 0, value.error))))
    return _plus(re, _times(Value(_ZERO, Fraction(1)), _over(_times(half, Value(value.im, value.im * 0, value.error)), re)))


def _whole_root(value: int, n: int) -> int | None:
    """The n-th root when it is whole (Newton's iteration on integers)."""
    if value < 2:
        return value
    guess = 1 << -(-value.bit_length() // n)
    while True:
        better = ((n - 1) * guess + value // guess ** (n - 1)) // n
        if better >= guess:
            return guess if guess**n == value else None
        guess = better


def _abs(value: Value) -> Value:
    if value.real:
        return Value(abs(value.re), value.im, value.error)
    square = _plus(_times(_part(value.re, value), _part(value.re, value)), _times(_part(value.im, value), _part(value.im, value)))
    return _root(Value(Fraction(2)), square)


def _part(part: Part, of: Value) -> Value:
    return Value(part, part * 0, of.error)


def _real(value: Value) -> tuple[Decimal, Decimal]:
    if not value.real:
        raise NoExpression("of a real number only")
    blurred = _blur(value)
    return _decimal(blurred.re), blurred.error or Decimal(0)


def _ln(value: Value) -> Value:
    if value == Value(Fraction(1)):
        return Value(_ZERO)
    x, error = _real(value)
    if x <= 4 * error:
        raise NoExpression("logarithm of what is not positive")
    return _known(x.ln(), Decimal(0), error / x)


def _log(base: Value, value: Value) -> Value:
    return _over(_ln(value), _ln(base))


def _exp(value: Value) -> Value:
    value = _blur(value)
    x, y, error = _decimal(value.re), _decimal(value.im), value.error or Decimal(0)
    if abs(x) > MAX_EXPONENT:
        raise TooLarge("too large")
    size = x.exp()
    return _times(Value(size, Decimal(0), size * (2 * error + _ROUNDING)), Value(*_circle(y, error))) if y else _known(
        size, Decimal(0), size * 2 * error
    )


def _circle(angle: Decimal, error: Decimal) -> tuple[Decimal, Decimal, Decimal]:
    """Cosine, sine and their error, by Taylor's series at the angle less whole turns."""
    if abs(angle) > MAX_ANGLE:
        raise TooLarge("too large an angle")
    turns = (angle / (2 * _PI)).to_integral_value()
    x = angle - turns * 2 * _PI
    error += (abs(angle) + 1) * 4 * _ROUNDING
    sums = [Decimal(0), Decimal(0)]
    term, n = Decimal(1), 0
    while n < 2 or abs(term) > _ROUNDING:
        sums[n % 2] += term if n % 4 < 2 else -term
        n += 1
        term = term * x / n
    return sums[0], sums[1], error + 60 * _ROUNDING


def _atan(value: Value) -> Value:
    x, error = _real(value)
    doubled = 0
    while abs(x) > Decimal("0.05"):
        x = x / (1 + (1 + x * x).sqrt())
        doubled += 1
    found, power, n = Decimal(0), x, 1
    while abs(power) > _ROUNDING * abs(x):
        found += power / n if n % 4 == 1 else -power / n
        power = power * x * x
        n += 2
    return _known(found * 2**doubled, Decimal(0), error + 60 * _ROUNDING)


def _function(name: str, value: Value) -> Value:
    one = Value(Fraction(1))
    if name == "ln":
        return _ln(value)
    if name == "exp":
        return _exp(value)
    if name == "arctan":
        return _atan(value)
    if name in ("arcsin", "arccos"):
        x, _ = _real(value)
        quarter = _over(_symbol("\\pi", 0), Value(Fraction(2)))
        rest = _minus(one, _times(value, value))
        if abs(x) > 1 + _BLURRED:
            raise NoExpression("of a sine only")
        at_the_end = rest.re == 0 or (rest.error is not None and abs(rest.re) <= 4 * rest.error)
        sine = (quarter if x > 0 else _neg(quarter)) if at_the_end else _atan(_over(value, _root(Value(Fraction(2)), rest)))
        return sine if name == "arcsin" else _minus(quarter, sine)
    if value == Value(_ZERO):
        cosine, sine = one, value
    else:
        c, s, error = _circle(*_real(value))
        cosine, sine = _known(c, Decimal(0), error), _known(s, Decimal(0), error)
    top, low = {"sin": (sine, one), "cos": (cosine, one), "tan": (sine, cosine)}.get(name, (one, one))
    if name in ("cot", "sec", "csc"):
        top, low = {"cot": (cosine, sine), "sec": (one, cosine), "csc": (one, sine)}[name]
    return _over(top, low)


_OPERATIONS: dict[str, Callable[..., Value]] = {
    "neg": _neg,
    "abs": _abs,
    "!": _factorial,
    "+": _plus,
    "mixed": _plus,
    "*": _times,
    "/": _over,
    "frac": _over,
    "^": _power,
    "root": _root,
    "binom": _binom,
    "log": _log,
}
