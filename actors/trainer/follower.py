"""`python -m actors.trainer.follower`: a rank of the trainer other than 0, of any training library.

Needs RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (and LOCAL_RANK on hosts with several GPUs) as rank 0 has them: whoever starts it
gives them, the trainer itself, torchrun or Ray. Everything else comes from rank 0. It never touches the bus. Arguments are for
process lists only.
"""

from __future__ import annotations

import logging
import sys

from actors.trainer.training.ranked import FollowingRank
from actors.trainer.training.ranks import Ranks

log = logging.getLogger("trainer.follower")


def main() -> int:
    """Connect, follow, part."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    ranks = Ranks.from_environment()
    if ranks.alone or ranks.rank == 0:
        log.error("RANK=%d of WORLD_SIZE=%d is no follower. Start rank 0 as the trainer.", ranks.rank, ranks.size)
        return 2
    ranks.connect()
    try:
        FollowingRank(ranks).follow()
    finally:
        ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
