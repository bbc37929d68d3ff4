"""A sound has a placeholder for each of its tokens, told by the whole sequence; one for all of them is refused."""

from __future__ import annotations

from lightning_sp.testing import assert_sharded_equals_unsharded
from tests.rewrite.hugging_face.media import sounds_ranks as ranks


def test_sounds_are_placed_where_the_whole_text_says(pools):
    case = dict(kind="sounds", strategy={"ring_size": 2})
    one = ranks.one_process(**case)
    for (answer,) in pools(2).run(ranks.sharded, [case]):
        assert not answer["error"], answer["error"]
        names = sorted(one["grads"])
        assert any("audio_tower" in name for name in names)
        assert_sharded_equals_unsharded([answer["grads"][n] for n in names], [one["grads"][n] for n in names], names)


def test_one_placeholder_for_a_whole_sound_is_refused_on_all_ranks(pools):
    for (answer,) in pools(2).run(ranks.sharded, [dict(kind="one for all", strategy={"ulysses_size": 2})]):
        assert (
            "Qwen2AudioModel: the batch has 2 sounds and 2 placeholders in its text, no two side by side"
            in answer["error"]
        )
