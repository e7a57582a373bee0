# ruff: noqa: E501
"""Programs that solve what they were asked, in the ways data sets ask and people write; each with its metadata, and one that fails."""

from __future__ import annotations

from typing import Any

Case = tuple[str, dict[str, Any], str]
"""What it is, metadata, program that solves it."""


def _io(given: Any, wanted: Any) -> dict[str, Any]:
    return {"tests": {"inputs": [given], "outputs": [wanted]}}


def _calls(name: str, given: Any, wanted: Any) -> dict[str, Any]:
    return {"tests": {"fn_name": name, "inputs": [given], "outputs": [wanted]}}


HONEST: list[Case] = [
    ("input loop", _io("3\n1\n2\n3\n", "6\n"), "n = int(input())\nprint(sum(int(input()) for _ in range(n)))"),
    ("to the end of input", _io("1 2\n3 4", "3\n7"),
     "while True:\n    try:\n        a, b = map(int, input().split())\n    except EOFError:\n        break\n    print(a + b)"),
    ("all of stdin", _io("4 5 6", "15"), "import sys\nprint(sum(map(int, sys.stdin.read().split())))"),
    ("bytes of stdin", _io("4\n5", "9"), "import sys\ndata = sys.stdin.buffer.read().split()\nprint(int(data[0]) + int(data[1]))"),
    ("input renamed", _io("7\n", "49"), "import sys\ninput = sys.stdin.readline\nprint(int(input()) ** 2)"),
    ("a main", _io("2", "4"), "def main():\n    print(int(input()) * 2)\n\nif __name__ == '__main__':\n    main()"),
    ("an exit", _io("0", "no"), "import sys\nif int(input()) == 0:\n    print('no')\n    sys.exit()\nprint('yes')"),
    ("an exit with 0", _io("0", "no"), "print('no')\nexit(0)"),
    ("deep recursion", _io("5000", "12502500"),
     "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n + f(n - 1) if n else 0\nprint(f(int(input())))"),
    ("recursion in a thread", _io("50000", "50000"),
     "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\ndef f(n): return 1 + f(n - 1) if n else 0\n"
     "t = threading.Thread(target=lambda: print(f(int(input()))))\nt.start()\nt.join()"),
    ("blanks at ends of lines", _io("3", "1 2 3\n"), "for i in range(1, int(input()) + 1): print(i, end=' ')\nprint()"),
    ("a format", _io("1 3", "0.3333"), "a, b = map(int, input().split())\nprint(f'{a / b:.4f}')"),
    ("more digits than were kept", _io("2", "1.414213562"), "print(int(input()) ** 0.5)"),
    ("a sum in another order", _io("", "0.6"), "print(0.1 + 0.2 + 0.3)"),
    ("written at once", _io("3", ["1", "2", "3"]), "import sys\nsys.stdout.write('\\n'.join(map(str, range(1, int(input()) + 1))))"),
    ("numpy may be missing", _io("1 2 3", "6"), "try:\n    import numpy as np\nexcept ImportError:\n    np = None\nprint(sum(map(int, input().split())))"),
    ("a result of tuples", _calls("pairs", [2], [[[0, 1], [1, 2]]]), "def pairs(n): return [(i, i + 1) for i in range(n)]"),
    ("a method of Solution", _calls("twoSum", [[2, 7], 9], [0, 1]),
     "from typing import List\nclass Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        return [0, 1]"),
    ("keys that are numbers", _calls("f", [{"1": 2, "3": 4}], {"1": 3, "3": 5}), "def f(d): return {k + 0: v + 1 for k, v in d.items()}"),
    ("a function named as a builtin", _calls("sum", [[1, 2]], 3), "def sum(values):\n    total = 0\n    for v in values: total += v\n    return total"),
    ("a method named as a builtin", _calls("max", [[1, 2]], 2), "class Solution:\n    def max(self, values): return sorted(values)[-1]"),
    ("a float that was rounded", _calls("mean", [[0.1, 0.2]], 0.15), "def mean(v): return sum(v) / len(v)"),
    ("HumanEval", {"tests": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1.0, 2.0], 0.3) == False\n    assert candidate([1.0, 1.1], 0.3) == True\n",
                   "entry_point": "close"}, "def close(numbers, t):\n    return any(abs(a - b) < t for i, a in enumerate(numbers) for b in numbers[i + 1:])"),
    ("HumanEval with a tolerance", {"tests": "def check(candidate):\n    assert abs(candidate(3.5) - 0.5) < 1e-6\ncheck(frac)"}, "def frac(x): return x % 1.0"),
    ("MBPP", {"tests": ["assert set(similar((3, 4, 5, 6), (5, 7, 4, 10))) == set((4, 5))", "assert tup({(1, 2): 3}) == {(2, 1): 3}"]},
     "def similar(a, b): return tuple(set(a) & set(b))\ndef tup(d): return {(b, a): v for (a, b), v in d.items()}"),
    ("MBPP of sets", {"tests": ["assert f([1, 2, 2]) == {1, 2}", "assert f([]) == set()"]}, "def f(v): return set(v)"),
    ("KodCode", {"tests": "from solution import add\n\ndef test_small():\n    assert add(1, 2) == 3\n\ndef test_large():\n    assert add(10**9, 1) == 10**9 + 1\n"},
     "def add(a, b): return a + b"),
    ("KodCode of a class", {"tests": "from solution import Account as A\n\nclass TestAccount:\n    def setup_method(self):\n        self.a = A()\n"
                                     "    def test_it(self):\n        self.a.put(5)\n        assert self.a.total == 5\n"},
     "class Account:\n    def __init__(self): self.total = 0\n    def put(self, n): self.total += n"),
    ("unittest", {"tests": "import unittest\n\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.n = 2\n    def test_it(self):\n        self.assertEqual(twice(self.n), 4)\n"
                           "        with self.assertRaises(ValueError):\n            twice(-1)\n\nif __name__ == '__main__':\n    unittest.main()"},
     "def twice(n):\n    if n < 0: raise ValueError('negative')\n    return 2 * n"),
    ("an expected exception", {"tests": "try:\n    f('a')\n    raise AssertionError('no error')\nexcept TypeError as error:\n    assert 'text' in str(error)"},
     "def f(x):\n    if isinstance(x, str): raise TypeError('a text')\n    return x"),
    ("an iterator", {"tests": "it = numbers()\nassert next(it) == 1 and next(it) == 2\ntry:\n    next(it)\n    assert False\nexcept StopIteration:\n    pass"},
     "def numbers():\n    yield 1\n    yield 2"),
    ("a linked list", {"tests": "class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\nassert length(Node(1, Node(2))) == 2"},
     "def length(n):\n    return 0 if n is None else 1 + length(n.next)"),
]  # fmt: skip

WRONG: list[Case] = [
    ("a number that differs", _io("", "0.6"), "print(0.61)"),
    ("a whole number that differs by little", _io("", "1000000000000"), "print(1000000000001.0)"),
    ("no number", _io("", "0.6"), "print('nan')"),
    ("tuples of another length", _calls("f", [1], [[[0, 1], [1, 2]]]), "def f(n): return [(0, 1)]"),
    ("an object that is equal to all", _calls("f", [1], [3]), "class E(list):\n    __eq__ = lambda s, o: True\ndef f(n): return E([4])"),
    ("its own all and type", _calls("f", [1], [3]), "all = lambda v: True\ntype = lambda v: list\nlen = lambda v: 1\nmap = lambda *v: [True]\ndef f(n): return [4]"),
    ("HumanEval", {"tests": "def check(candidate):\n    assert candidate(1) == 2\n", "entry_point": "f"}, "def f(x): return x"),
    ("KodCode", {"tests": "from solution import f\n\ndef test_f():\n    assert f(1) == 2\n"}, "def f(x): return x"),
    ("a test's class", {"tests": "class TestF:\n    def test_f(self):\n        assert f(1) == 2\n"}, "def f(x): return x"),
    ("unittest", {"tests": "import unittest\nclass T(unittest.TestCase):\n    def test_f(self): self.assertEqual(f(1), 2)"}, "def f(x): return x"),
    ("unittest's main", {"tests": "import unittest\nclass T(unittest.TestCase):\n    def test_f(self): self.assertEqual(f(1), 2)\nunittest.main()"}, "def f(x): return x"),
    ("an end of the test's loop", {"tests": "assert all(map(lambda n: f(n) == n + 1, range(3)))"}, "def f(x): raise StopIteration"),
    ("an end of the test's pairs", {"tests": "for found, wanted in zip(map(f, [1, 2]), [2, 3]): assert found == wanted"}, "def f(x): raise StopIteration"),
    ("a module that ends who imports it", {"tests": "assert f(1) == 2"}, "import types\nf = types.ModuleType('idlelib.idle')"),
    ("the test's own exit", {"tests": "import sys\nassert apply(sys.exit, 0) == 1"}, "def apply(f, x): return f(x)"),
    ("two builtins of its own", {"tests": "assert abs(sum(1, 2) - 3.0) < 1e-6"}, "sum = lambda a, b: 0\nabs = lambda x: 0"),
    ("no value, where any error will do", {"tests": "try:\n    assert f == 3\nexcept Exception:\n    pass"},
     "import os, json, time\ndef say(word):\n    b = json.dumps(word).encode()\n    os.write(3, len(b).to_bytes(4, 'little') + b)\n"
     "say(['say', ['f']])\nsay(['say', ['gave', ['set', [['list', []]]], []]])\ntime.sleep(30)"),
]  # fmt: skip

UNUSABLE = [
    "f(1) == 3",
    "def check(candidate):\n    assert candidate(1) == 2",
    "import math\n\nclass Helper:\n    pass",
    "def test_f(monkeypatch):\n    assert f(1) == 2",
    "async def test_f():\n    assert f(1) == 2",
]
