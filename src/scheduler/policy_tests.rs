use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn demand(group: u64, kv_bytes: usize) -> Demand {
    Demand { group: if group == 0 { vec![] } else { vec![group] }, kv_bytes }
}

fn bounds(max_batch: usize) -> Bounds {
    Bounds { max_batch, kv_budget: None, chunk_alone: 100, chunk_beside: 10 }
}

fn id(number: u64) -> RequestId {
    RequestId(number)
}

/// Admits and reads prompts of one token until everybody who may decodes.
fn settle(policy: &mut Policy) -> Work {
    loop {
        match policy.decide() {
            Work::Admit(_) => {}
            Work::Prefill(id, _) => policy.prefilled(id),
            work => return work,
        }
    }
}

#[test]
fn a_long_prompt_lets_others_step_between_its_chunks() {
    let mut policy = Policy::new(bounds(4));
    policy.submit(id(1), demand(0, 0));
    assert_eq!(policy.decide(), Work::Admit(id(1)));
    assert_eq!(policy.decide(), Work::Prefill(id(1), 100));
    policy.prefilled(id(1));
    policy.submit(id(2), demand(0, 0));
    policy.submit(id(3), demand(0, 0));
    assert_eq!(policy.decide(), Work::Admit(id(2)));
    for _ in 0..3 {
        assert_eq!(policy.decide(), Work::Prefill(id(2), 10));
        policy.fed(10);
        assert_eq!(policy.decide(), Work::Decode(vec![id(1)]));
    }
    assert_eq!(policy.decide(), Work::Prefill(id(2), 10));
    policy.fed(3);
    policy.prefilled(id(2));
    // What is left of the credit goes to the next prompt.
    assert_eq!(policy.decide(), Work::Admit(id(3)));
    assert_eq!(policy.decide(), Work::Prefill(id(3), 7));
    policy.fed(7);
    assert_eq!(policy.decide(), Work::Decode(vec![id(1), id(2)]));
}

#[test]
fn a_batch_of_one_is_a_strict_queue() {
    let mut policy = Policy::new(bounds(1));
    policy.submit(id(1), demand(0, 0));
    policy.submit(id(2), demand(0, 0));
    assert_eq!(settle(&mut policy), Work::Decode(vec![id(1)]));
    assert_eq!(settle(&mut policy), Work::Decode(vec![id(1)]));
    assert!(policy.remove(id(1)));
    assert_eq!(settle(&mut policy), Work::Decode(vec![id(2)]));
}

#[test]
fn groups_take_turns() {
    let mut policy = Policy::new(bounds(8));
    for (number, group) in [(1, 0), (2, 7), (3, 0), (4, 8)] {
        policy.submit(id(number), demand(group, 0));
    }
    let first = settle(&mut policy);
    let second = settle(&mut policy);
    let third = settle(&mut policy);
    let mut turns = vec![first.clone(), second, third];
    assert_eq!(settle(&mut policy), first);
    turns.sort_by_key(|work| format!("{work:?}"));
    assert_eq!(
        turns,
        [Work::Decode(vec![id(1), id(3)]), Work::Decode(vec![id(2)]), Work::Decode(vec![id(4)])]
    );
}

#[test]
fn who_does_not_fit_the_budget_waits_and_is_not_overtaken() {
    let mut policy = Policy::new(Bounds { kv_budget: Some(100), ..bounds(8) });
    policy.submit(id(1), demand(0, 60));
    policy.submit(id(2), demand(0, 50));
    policy.submit(id(3), demand(0, 10));
    assert_eq!(settle(&mut policy), Work::Decode(vec![id(1)]));
    assert_eq!(policy.waiting(), 2);
    policy.remove(id(1));
    assert_eq!(settle(&mut policy), Work::Decode(vec![id(2), id(3)]));
}

#[test]
fn leaving_frees_the_place_wherever_it_was() {
    let mut policy = Policy::new(bounds(2));
    for number in 1..=4 {
        policy.submit(id(number), demand(0, 0));
    }
    assert_eq!(policy.decide(), Work::Admit(id(1)));
    assert!(policy.remove(id(1)));
    assert!(policy.remove(id(3)));
    assert!(!policy.remove(id(3)));
    assert_eq!(settle(&mut policy), Work::Decode(vec![id(2), id(4)]));
    assert!(policy.remove(id(2)) && policy.remove(id(4)));
    assert_eq!(policy.decide(), Work::Idle);
}

/// What a driver of the machine knows of a request.
#[derive(Debug)]
struct Model {
    group: u64,
    prompt: usize,
    tokens: usize,
    started: bool,
    /// Decode turns since its last step.
    skipped: usize,
}

proptest! {
    /// Whatever comes and goes: requests start in order, nobody starves, one step is of one group, prompts do not hold
    /// up steps, and everything ends.
    #[test]
    fn every_schedule_is_fair_and_ends(
        max_batch in 1usize..5,
        budget in prop::option::of(50usize..200),
        arrivals in prop::collection::vec((0u64..3, 1usize..40, 1usize..12, 1usize..50, 0usize..6), 1..30),
        leaves in prop::collection::vec((0usize..200, 0u64..30), 0..8),
    ) {
        let mut policy = Policy::new(Bounds { kv_budget: budget, ..bounds(max_batch) });
        let mut live: BTreeMap<RequestId, Model> = BTreeMap::new();
        let mut arrivals = arrivals.into_iter().zip(0u64..).peekable();
        let (mut last_started, mut read_since_step, mut pause) = (None, 0, 0usize);
        for tick in 0..100_000usize {
            while pause == 0 && let Some(((group, prompt, tokens, kv, gap), number)) = arrivals.next() {
                policy.submit(id(number), demand(group, kv));
                live.insert(id(number), Model { group, prompt, tokens, started: false, skipped: 0 });
                pause = gap;
            }
            pause = pause.saturating_sub(1);
            for (_, number) in leaves.iter().filter(|(when, _)| *when == tick) {
                let known = live.remove(&id(*number)).is_some();
                prop_assert_eq!(policy.remove(id(*number)), known);
            }
            match policy.decide() {
                Work::Admit(id) => {
                    prop_assert!(last_started < Some(id), "{:?} after {:?}", id, last_started);
                    last_started = Some(id);
                    live.get_mut(&id).unwrap().started = true;
                }
                Work::Prefill(id, most) => {
                    let others = live.values().filter(|row| row.started && row.prompt == 0).count();
                    let row = live.get_mut(&id).unwrap();
                    let fed = most.min(row.prompt);
                    read_since_step = if others == 0 { 0 } else { read_since_step + fed };
                    prop_assert!(read_since_step <= 10, "{} tokens between steps", read_since_step);
                    row.prompt -= fed;
                    policy.fed(fed);
                    if row.prompt == 0 {
                        policy.prefilled(id);
                    }
                }
                Work::Decode(rows) => {
                    read_since_step = 0;
                    prop_assert!(!rows.is_empty());
                    let group = live[&rows[0]].group;
                    for (id, row) in &mut live {
                        let decodes = row.started && row.prompt == 0;
                        row.skipped = if rows.contains(id) { 0 } else { row.skipped + usize::from(decodes) };
                        // Each other group may come first, once.
                        prop_assert!(row.skipped <= 2, "{:?} starves", id);
                        prop_assert_eq!(rows.contains(id), decodes && row.group == group);
                    }
                    for id in rows {
                        let row = live.get_mut(&id).unwrap();
                        row.tokens -= 1;
                        if row.tokens == 0 {
                            live.remove(&id);
                            prop_assert!(policy.remove(id));
                        }
                    }
                }
                Work::Idle => {
                    prop_assert!(live.is_empty(), "idle with {:?}", live);
                    if arrivals.peek().is_none() {
                        return Ok(());
                    }
                }
            }
            let active = live.values().filter(|row| row.started).count();
            prop_assert!(active <= max_batch);
        }
        prop_assert!(false, "never ends");
    }
}
