"""State beside the transcript: a shop whose stock and carts outlive the process.

Teaches: documents of a session and of a conversation (those of a task end with it); a family, with
one instance for each key; a draft, which the commit compares, and `append_text`, which costs only
what it adds; `migrate`, for what older code has stored; retirement; and the limit of size.

Run it with: python examples/11_documents.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import attrs
import trio

from pidurable import Settings, document, open_harness
from pidurable.errors import DocumentTooLargeError


@document("shop.stock", scope="session", family=True)
@attrs.define
class Stock:
    pieces: int = 0


@document("shop.cart")
@attrs.define
class OldCart:  # as an earlier release had it
    fruit: str = ""
    diary: str = ""


@document("shop.cart", version=2)
@attrs.define
class Cart:
    items: dict[str, int] = attrs.Factory(dict)
    diary: str = ""

    @staticmethod
    def migrate(value: dict[str, str], from_version: int) -> dict[str, object]:
        return {"items": {value["fruit"]: 1}, "diary": value["diary"]}


async def main(store: Path) -> None:
    async with open_harness(store) as harness:  # the earlier release
        root = await harness.root()
        async with harness.commit() as tx:  # both documents, or none
            for key in ("apples", "pears"):
                (await tx.document(Stock, key=key)).pieces = 12
            cart = await tx.document(OldCart, root.id)
            cart.fruit, cart.diary = "apples", "Monday: apples."
    async with open_harness(store, settings=Settings(document_bytes_max=4_096)) as harness:
        print("read today:", harness.snapshot(Cart, root.id))  # nothing is written by reading
        async with harness.commit() as tx:
            (await tx.document(Cart, root.id)).items["pears"] = 2
            for key, sold in (("apples", 1), ("pears", 2)):
                (await tx.document(Stock, key=key)).pieces -= sold
        async with harness.commit() as tx:  # as a stream would: 18 bytes, however long the diary
            tx.append_text(Cart, root.id, "/diary", " Tuesday: 2 pears.")
        print("in the cart:", harness.snapshot(Cart, root.id))
        print("pears:", harness.snapshot(Stock, key="pears"))
        try:
            async with harness.commit() as tx:
                (await tx.document(Stock, key="apples")).pieces = 0
                tx.append_text(Cart, root.id, "/diary", "!" * 5_000)
        except DocumentTooLargeError as refused:
            print("refused:", refused)
        print("apples:", harness.snapshot(Stock, key="apples"))  # nothing of that commit is stored
        async with harness.commit() as tx:
            tx.retire(Cart, root.id)
        print("retired:", harness.snapshot(Cart, root.id))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trio.run(main, Path(folder) / "shop.sqlite")
