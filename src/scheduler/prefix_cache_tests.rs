use proptest::prelude::*;

use super::*;

/// Kept numbers: bytes, and the shortest length that they can be cut to.
#[derive(Clone, Debug, PartialEq)]
struct Stub {
    bytes: usize,
    shortest: usize,
    name: u32,
}

impl Kept for Stub {
    fn nbytes(&self) -> usize {
        self.bytes
    }

    fn can_shorten_to(&self, length: usize) -> bool {
        length >= self.shortest
    }
}

fn stub(name: u32, bytes: usize) -> Stub {
    Stub { bytes, shortest: 0, name }
}

fn fixed(name: u32) -> Stub {
    Stub { bytes: 1, shortest: usize::MAX, name }
}

fn found(cache: &mut PrefixCache<u8, Stub>, prompt: &[u32]) -> Option<(usize, u32)> {
    cache.find(&0, prompt).map(|(length, kept)| (length, kept.name))
}

/// cases P1: the same prompt twice leaves a token to compute.
#[test]
fn the_same_prompt_again_leaves_one_token() {
    let mut cache = PrefixCache::new(100);
    cache.insert(&0, vec![1, 2, 3], stub(7, 1));
    assert_eq!(found(&mut cache, &[1, 2, 3]), Some((2, 7)));
    assert_eq!(found(&mut cache, &[1, 2, 3, 4]), Some((3, 7)));
    assert_eq!(found(&mut cache, &[1]), None);
    assert_eq!(found(&mut cache, &[2]), None);
    // The donor is still there.
    assert_eq!(found(&mut cache, &[1, 2, 3]), Some((2, 7)));
    assert_eq!((cache.stats().hits, cache.stats().misses), (3, 2));
}

#[test]
fn what_cannot_be_cut_serves_whole_or_not_at_all() {
    let mut cache = PrefixCache::new(100);
    cache.insert(&0, vec![1, 2, 3, 4], fixed(1));
    cache.insert(&0, vec![1, 2], fixed(2));
    assert_eq!(found(&mut cache, &[1, 2, 3, 4]), Some((2, 2)));
    assert_eq!(found(&mut cache, &[1, 2, 3, 4, 5]), Some((4, 1)));
    assert_eq!(found(&mut cache, &[1, 9]), None);
}

/// cases P7: nothing is found across namespaces.
#[test]
fn namespaces_share_nothing() {
    let mut cache: PrefixCache<(Vec<u64>, bool), Stub> = PrefixCache::new(100);
    cache.insert(&(vec![1], false), vec![1, 2, 3], stub(1, 1));
    for other in [(vec![], false), (vec![2], false), (vec![1, 2], false), (vec![1], true)] {
        assert!(cache.find(&other, &[1, 2, 3]).is_none());
    }
    cache.retain(|(adapters, _)| !adapters.contains(&1));
    assert_eq!((cache.stats().entries, cache.stats().bytes), (0, 0));
}

/// cases P6: sequences that begin with each other.
#[test]
fn prefixes_of_a_sequence_are_all_found() {
    let keys = [vec![1], vec![1, 2], vec![1, 2, 3], vec![1, 3], vec![2]];
    let entries: BTreeMap<Vec<u32>, ()> = keys.iter().cloned().map(|key| (key, ())).collect();
    assert_eq!(prefixes(&entries, &[1, 2, 3]), [vec![1, 2], vec![1]]);
    assert_eq!(prefixes(&entries, &[1, 2, 3, 9]), [vec![1, 2, 3], vec![1, 2], vec![1]]);
    assert_eq!(prefixes(&entries, &[1, 2, 0]), [vec![1, 2], vec![1]]);
    assert!(prefixes(&entries, &[0]).is_empty() && prefixes(&entries, &[2]).is_empty());
}

#[test]
fn the_least_recently_used_goes_first() {
    let mut cache = PrefixCache::new(10);
    cache.insert(&0, vec![1, 1], stub(1, 4));
    cache.insert(&0, vec![2, 2], stub(2, 4));
    assert_eq!(found(&mut cache, &[1, 1, 1]), Some((2, 1)));
    cache.insert(&0, vec![3, 3], stub(3, 4));
    assert_eq!(found(&mut cache, &[2, 2, 2]), None);
    assert_eq!(found(&mut cache, &[1, 1, 1]), Some((2, 1)));
    cache.insert(&0, vec![4, 4], stub(4, 11));
    assert_eq!(cache.stats().entries, 2);
    let mut off = PrefixCache::new(0);
    off.insert(&0, vec![1, 2], stub(1, 0));
    assert_eq!(found(&mut off, &[1, 2]), None);
    assert_eq!(off.stats().misses, 0);
}

#[derive(Clone, Debug)]
enum Act {
    Insert(u8, Vec<u32>, usize, bool),
    Find(u8, Vec<u32>),
    Drop(u8),
}

fn act() -> impl Strategy<Value = Act> {
    let tokens = || prop::collection::vec(0u32..3, 1..7);
    prop_oneof![
        (0u8..3, tokens(), 1usize..30, any::<bool>()).prop_map(|(n, t, b, c)| Act::Insert(n, t, b, c)),
        (0u8..3, tokens()).prop_map(|(n, t)| Act::Find(n, t)),
        (0u8..3).prop_map(Act::Drop),
    ]
}

proptest! {
    /// cases P6: against a plain list that is searched from end to end.
    #[test]
    fn it_behaves_as_a_list_does(acts in prop::collection::vec(act(), 1..60)) {
        const MAX: usize = 60;
        let mut cache = PrefixCache::new(MAX);
        // Least recently used first.
        let mut list: Vec<(u8, Vec<u32>, Stub)> = Vec::new();
        for (number, act) in (0u32..).zip(acts) {
            match act {
                Act::Insert(namespace, tokens, bytes, whole) => {
                    let kept = Stub { bytes, shortest: if whole { usize::MAX } else { 0 }, name: number };
                    list.retain(|(other, known, _)| {
                        let prefix = *other == namespace && tokens.starts_with(known);
                        !(prefix && (known.len() == tokens.len() || !whole))
                    });
                    list.push((namespace, tokens.clone(), kept.clone()));
                    while list.iter().map(|(.., kept)| kept.bytes).sum::<usize>() > MAX {
                        list.remove(0);
                    }
                    cache.insert(&namespace, tokens, kept);
                }
                Act::Find(namespace, prompt) => {
                    let usable = |(other, tokens, kept): &(u8, Vec<u32>, Stub)| {
                        let length = common(tokens, &prompt).min(prompt.len() - 1);
                        let cut = length < tokens.len();
                        (*other == namespace && length > 0 && (!cut || kept.shortest == 0)).then_some(length)
                    };
                    let best = list.iter().filter_map(usable).max();
                    let found = cache.find(&namespace, &prompt);
                    prop_assert_eq!(best, found.as_ref().map(|(length, _)| *length));
                    if let Some((length, kept)) = found {
                        let place = list.iter().position(|(.., other)| *other == kept).unwrap();
                        let entry = list.remove(place);
                        prop_assert_eq!(usable(&entry), Some(length));
                        list.push(entry);
                    }
                }
                Act::Drop(namespace) => {
                    list.retain(|(other, ..)| *other != namespace);
                    cache.retain(|other| *other != namespace);
                }
            }
            let stats = cache.stats();
            prop_assert_eq!(stats.entries, list.len());
            prop_assert_eq!(stats.bytes, list.iter().map(|(.., kept)| kept.bytes).sum::<usize>());
            prop_assert!(stats.bytes <= MAX);
        }
    }
}
