"""A program and its tests in two processes: what holds in one namespace holds here, and what a program does to its own earns nothing."""

from __future__ import annotations

import datetime
import decimal
import fractions
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from actors.runtime.plain import decode, encode
from actors.runtime.sandbox import Sandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[Sandbox]:
    async with Sandbox(width=4, deadline_s=15.0) as sandbox:
        yield sandbox


HOLDS = [
    ('def add(a,b): return a+b',
     'assert add(1,2)==3'),
    ('import math\ndef f(x): return 3.0',
     'assert math.isclose(f(1),3)'),
    ('from math import isclose\ndef f(x): return 3.0',
     'assert isclose(f(1),3)'),
    ('def sum(a,b): return a*b',
     'assert sum(10,15)==150'),
    ('class Solution:\n  def two(self, nums, t): return [nums.index(t)]',
     's=Solution()\nassert s.two([1,2,3],3)==[2]'),
    ('def sort(l): l.sort()',
     'x=[3,1,2]\nsort(x)\nassert x==[1,2,3]'),
    ('def rot(m): m[:] = [list(r) for r in zip(*m[::-1])]',
     'x=[[1,2],[3,4]]\nrot(x)\nassert x==[[3,1],[4,2]]'),
    ('def apply(f,x): return f(x)',
     'assert apply(lambda x: x+1, 3)==4'),
    ('def depth(n): return 0 if n is None else 1+max(depth(n.left),depth(n.right))',
     'class T:\n  def __init__(s,left=None,right=None): s.left,s.right=left,right\nassert depth(T(T(),T(T())))==3'),
    ("class V:\n  def __init__(s,x,y): s.x,s.y=x,y\n  def __add__(s,o): return V(s.x+o.x,s.y+o.y)\n  def __eq__(s,o): return (s.x,s.y)==(o.x,o.y)\n  def __repr__(s): return f'V({s.x}, {s.y})'",
     "assert V(1,2)+V(2,3)==V(3,5)\nassert not V(1,2)==V(1,3)\nassert str(V(1,2))=='V(1, 2)'\nassert V(1,2).x==1"),
    ('def gen(n):\n  for i in range(n): yield i',
     'assert list(gen(4))==[0,1,2,3]\nassert next(gen(3))==0\nassert sum(gen(4))==6'),
    ("class Bad(ValueError): pass\ndef f(x):\n  if x<0: raise Bad('no')\n  return x",
     "try:\n  f(-1)\n  assert False\nexcept Bad as e:\n  assert str(e)=='no'\ntry:\n  f(-1)\n  assert False\nexcept ValueError: pass"),
    ('async def f(x): return x+1',
     'import asyncio\nassert asyncio.run(f(1))==2'),
    ('def add(a,b): return a+b',
     'def check(candidate):\n    assert candidate(1,2)==3\n    assert candidate(0,0)==0\ncheck(add)'),
    ('from collections import Counter, deque\ndef f(s): return Counter(s)\ndef g(): return deque([1,2])',
     "assert f('aab')=={'a':2,'b':1}\nassert g()==deque([1,2])"),
    ('import numpy as np\ndef f(): return np.arange(3)*2',
     'assert (f()==np.array([0,2,4])).all()\nassert np.allclose(f(),[0,2,4])'),
    ("from collections import namedtuple\nP=namedtuple('P','x y')\ndef f(): return P(1,2)",
     'assert f()==(1,2) and f().x==1'),
    ('x = 5\ndef inc():\n  global x\n  x+=1',
     'assert x==5\ninc()\nassert x==6'),
    ('def isprime(n): return n>1 and all(n%i for i in range(2,n))',
     'assert isprime(7) is True\nassert not isprime(8)'),
    ("def f(x): return float('nan') if x else 1e308*10",
     "import math\nassert math.isnan(f(1)) and f(0)==float('inf')"),
    ('def f(n): return 3**n',
     'assert f(20000)==3**20000'),
]  # fmt: skip
EARNS_NOTHING = [
    ('def add(a,b): return a+b',
     'assert add(1,2)==4'),
    ('class E:\n  __eq__=lambda s,o:True\ndef add(a,b): return E()',
     'assert add(1,2)==3'),
    ('class E(int):\n  __eq__=lambda s,o:True\ndef add(a,b): return E()',
     'assert add(1,2)==3'),
    ('class E:\n  __sub__=lambda s,o:0.0\n  __rsub__=__sub__\n  __abs__=lambda s:0.\n  __lt__=lambda s,o:True\n  __contains__=lambda s,o:True\ndef f(a): return E()',
     'assert abs(f(1)-3)<1e-6'),
    ('class E:\n  __contains__=lambda s,o:True\ndef f(a): return E()',
     'assert 3 in f(1)'),
    ('abs=lambda x: 0\ndef f(x): return 1.0',
     'assert abs(f(1)-3)<1e-6'),
    ('all=lambda x: True\ndef f(x): return 1.0',
     'assert all(f(i)==i*2 for i in range(9))'),
    ('class math:\n  isclose=staticmethod(lambda *a,**k:True)\ndef f(x): return 1.0',
     'assert math.isclose(f(1),3)'),
    ('import numpy as np\ndef f(): return np.arange(3)*2',
     'assert (f()==np.array([0,2,5])).all()'),
    ('def f():\n  import sys\n  sys.exit(0)',
     'f()'),
    ('import os\nos._exit(0)',
     'assert True'),
    ('def f(): import os; os._exit(0)',
     'try:\n  f()\nexcept Exception: pass'),
    ('class E:\n  startswith=lambda s,*a:True\ndef f(): return E()',
     "assert f().startswith('a')"),
    ('1/0',
     'assert True'),
    ("import linecache, re\nsource = ''.join(''.join(v[2]) for v in linecache.cache.values() if len(v) > 2)\ndef f(x): return int(re.findall('f.1.==(.*)', source)[0])",
     'assert f(1)==3'),
    ("import sys\ndef f(x):\n  frame = sys._getframe()\n  while frame:\n    for one in [*frame.f_code.co_consts, *map(repr, frame.f_locals.values())]:\n      if 'f(1)==' in str(one): return int(str(one).split('f(1)==')[1][0])\n    frame = frame.f_back",
     'assert f(1)==3'),
    ("import gc\ndef f(x):\n  for one in gc.get_objects():\n    if isinstance(one, dict):\n      for v in list(one.values()):\n        if isinstance(v, str) and 'f(1)=' in v: return int(v.split('f(1)==')[1][0])",
     'assert f(1)==3'),
    ("import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {'__init__': lambda s: __import__('os')._exit(0)})\ndef f(x): return 1",
     'assert f(1)==3'),
    ('import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): raise SystemExit(0)',
     'assert f(1)==3'),
    ('import os\ndef f(x): os._exit(0)',
     'assert f(1)==3'),
    ("import sys\nsys.excepthook = lambda *a: __import__('os')._exit(0)\nsys.settrace(lambda *a: None)\ndef f(x): return 1",
     'assert f(1)==3'),
    ('class Everything:\n  def __getattr__(s, n): return lambda *a, **k: True\n  __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda s, o: True\n  __hash__ = lambda s: 0\n  __class__ = property(lambda s: int)\ndef f(x): return Everything()',
     'assert f(1)==3'),
    ('class Everything(list):\n  __eq__ = lambda s, o: True\ndef f(x): return Everything([1])',
     'assert f(1)==[3]'),
    ('class Everything(dict):\n  __eq__ = lambda s, o: True\n  __missing__ = lambda s, k: 3\ndef f(x): return Everything()',
     "assert f(1)['a']==3"),
    ("class Everything(str):\n  __eq__ = lambda s, o: True\n  __str__ = lambda s: s\ndef f(x): return Everything('a')",
     "assert f(1)=='3'"),
    ('class Everything:\n  __eq__ = lambda s, o: True\n  __hash__ = lambda s: hash(3)\ndef f(x): return [Everything()]',
     'assert f(1)==[3] or set(f(1))=={3} or 3 in f(1)'),
    ("import actors.runtime.examined as e\ne.encode = lambda *a: ['mine', 1, 'object', 'x', '']\ndef f(x): return 1",
     'assert f(1)==3'),
    ("import sys\nfor m in list(sys.modules.values()):\n  for n in ('encode', 'handed', 'decode'):\n    if hasattr(m, n) and 'actors' in m.__name__: setattr(m, n, lambda *a, **k: True)\ndef f(x): return 1",
     'assert f(1)==3'),
    ("import os, json\ndef say(word):\n  b = json.dumps(word).encode(); os.write(3, len(b).to_bytes(4, 'little') + b)\nsay(['say', ['f']])\nfor n in range(50): say(['say', ['gave', n, []]])\nimport time; time.sleep(30)",
     'assert f(1)==999'),
    ("import os\nos.write(3, b'\\xff' * 4096)\nimport time; time.sleep(30)",
     'assert f(1)==3'),
    ('import os\nos.close(3)\ndef f(x): return 3',
     'assert f(1)==3'),
    ("import os, json\ndef say(word):\n  b = json.dumps(word).encode(); os.write(3, len(b).to_bytes(4, 'little') + b)\nsay(['say', ['f']])\nsay(['say', ['gave', ['import', 'unittest.mock', 'ANY', 1], []]])\nimport time; time.sleep(30)",
     'assert f==3'),
    ("import os, json\ndef say(word):\n  b = json.dumps(word).encode(); os.write(3, len(b).to_bytes(4, 'little') + b)\nsay(['say', ['f']])\nsay(['ask', 'get', 1, ['list', [['list', ['__globals__']], ['dict', [], []]]]])\nimport time; time.sleep(30)",
     'assert f(lambda: 1)==3'),
    ('def isinstance(*a): return True\ndef len(x): return 3\ndef f(x): return []',
     'assert isinstance(f(1), int) and len(f(1))==3'),
    ('class Boom(Exception): pass\ndef f(x): raise Boom',
     'assert f(1)==3'),
    ('def f(x):\n  import sys; sys.setrecursionlimit(10**6); return f(x)',
     'assert f(1)==3'),
    ('def f(x):\n  l = []; l.append(l); return l',
     'assert f(1)==3'),
    ("def f(x): print('x' * 10**7); return 3",
     'assert f(1)==3'),
]  # fmt: skip


@pytest.mark.parametrize(("program", "tests"), HOLDS)
async def test_what_holds_in_one_namespace_holds(box: Sandbox, program: str, tests: str) -> None:
    ran = await box.examine(program, tests)
    assert ran.cause == "ok", ran.stderr


@pytest.mark.parametrize(("program", "tests"), EARNS_NOTHING)
async def test_what_a_program_does_to_its_own_process_earns_nothing(box: Sandbox, program: str, tests: str) -> None:
    assert (await box.examine(program, tests, deadline_s=4.0)).cause != "ok"


async def test_a_wrong_answer_is_told_by_the_line_that_found_it(box: Sandbox) -> None:
    ran = await box.examine("def f(x): return x", "assert f(1) == 1\nassert f(2) == 3")
    assert ran.cause == "raised" and "assert f(2) == 3" in ran.stderr


async def test_what_a_program_is_not_told_it_cannot_tell(box: Sandbox) -> None:
    """What a test expects is in no byte that the program can reach; what it is called with is."""
    program = """
import sys
class Look:
    __getattr__ = None
def f(x):
    import gc
    return sorted({str(one) for one in gc.get_objects() if isinstance(one, (list, dict, tuple)) and "zebra" in repr(one)}) != []
"""
    assert (await box.examine(program, "assert not f(1)\nexpected = 'zebra'\nassert not f(2)")).cause == "ok"


PLAIN: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.fractions()
    | st.decimals(allow_nan=False) | st.dates() | st.datetimes() | st.timedeltas() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.builds(deque, st.lists(inner)),
)  # fmt: skip


def _no_other(*_: Any) -> Any:
    raise ValueError("no plain value")


@given(PLAIN)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    word = json.loads(json.dumps(encode(value, _no_other)))
    again = decode(word, _no_other)
    assert again == value and type(again) is type(value)


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=20))
def test_what_is_no_word_is_an_error_and_of_no_other_type(word: Any) -> None:
    plain = (int, bool, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, complex, deque, range, fractions.Fraction)
    plain = (*plain, decimal.Decimal, datetime.date, datetime.time, datetime.timedelta, type(None), type(iter([])))
    try:
        value = decode(word, _no_other)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, OverflowError):
        return
    assert type(value) in plain or isinstance(value, tuple)
