//! Who is computed next: a state machine over plain data, which knows neither models nor clocks.
//!
//! Requests wait in the order in which they came and none overtakes another. One at a time reads its prompt, in chunks,
//! between which those that decode take their steps; those of one group (the same adapters) decode together, groups
//! take turns.

use std::collections::VecDeque;

use super::request::RequestId;

/// What a request will need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    /// Requests of different groups cannot share a step: numbers of adapters, in order.
    pub group: Vec<u64>,
    /// Bytes that its caches may grow to.
    pub kv_bytes: usize,
}

/// What bounds the machine.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Most requests that are computed at a time; at least 1.
    pub max_batch: usize,
    /// Most bytes that the caches of all of them may grow to.
    pub kv_budget: Option<usize>,
    /// Prompt tokens to read at a time while nobody decodes.
    pub chunk_alone: usize,
    /// Prompt tokens to read between two steps of others.
    pub chunk_beside: usize,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// Let the first that waits begin.
    Admit(RequestId),
    /// Read up to so many tokens of a prompt.
    Prefill(RequestId, usize),
    /// One step of these, which are of one group.
    Decode(Vec<RequestId>),
    /// Nothing to do.
    Idle,
}

/// A request that is decoding.
#[derive(Clone, Debug)]
struct Decoding {
    id: RequestId,
    demand: Demand,
    /// The turn of its last step, or in which it joined.
    turn: u64,
}

/// The machine.
#[derive(Clone, Debug)]
pub struct Policy {
    bounds: Bounds,
    waiting: VecDeque<(RequestId, Demand)>,
    prefilling: Option<(RequestId, Demand)>,
    decoding: Vec<Decoding>,
    /// Steps so far.
    turn: u64,
    /// Prompt tokens that may be read before the next step.
    credit: usize,
}

impl Policy {
    /// One without requests.
    pub fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            waiting: VecDeque::new(),
            prefilling: None,
            decoding: Vec::new(),
            turn: 0,
            credit: bounds.chunk_beside,
        }
    }

    /// A request joins the queue.
    pub fn submit(&mut self, id: RequestId, demand: Demand) {
        debug_assert!(!self.contains(id), "{id:?} is here already");
        self.waiting.push_back((id, demand));
    }

    /// What to do now.
    pub fn decide(&mut self) -> Work {
        self.check();
        let may_read = self.decoding.is_empty() || self.credit > 0;
        if let Some((id, _)) = &self.prefilling
            && may_read
        {
            let most = if self.decoding.is_empty() {
                self.bounds.chunk_alone
            } else {
                self.credit.min(self.bounds.chunk_beside)
            };
            return Work::Prefill(*id, most.max(1));
        }
        if self.prefilling.is_none()
            && may_read
            && self.has_room()
            && let Some((id, demand)) = self.waiting.pop_front()
        {
            self.prefilling = Some((id, demand));
            return Work::Admit(id);
        }
        self.step()
    }

    /// Lets the group whose turn is longest ago take a step.
    fn step(&mut self) -> Work {
        let Some(group) = self.decoding.iter().min_by_key(|row| row.turn).map(|row| row.demand.group.clone())
        else {
            return Work::Idle;
        };
        self.turn += 1;
        self.credit = self.bounds.chunk_beside;
        let rows = self.decoding.iter_mut().filter(|row| row.demand.group == group);
        let ids = rows.map(|row| {
            row.turn = self.turn;
            row.id
        });
        Work::Decode(ids.collect())
    }

    /// Reads prompts in other chunks from now on.
    pub fn set_chunks(&mut self, alone: usize, beside: usize) {
        self.bounds.chunk_alone = alone;
        self.bounds.chunk_beside = beside;
        self.credit = self.credit.min(beside);
    }

    /// So many tokens of a prompt were read.
    pub fn fed(&mut self, tokens: usize) {
        self.credit = self.credit.saturating_sub(tokens);
    }

    /// The prompt is read; the request decodes from now on.
    pub fn prefilled(&mut self, id: RequestId) {
        if let Some((_, demand)) = self.prefilling.take_if(|(prefilling, _)| *prefilling == id) {
            self.decoding.push(Decoding { id, demand, turn: self.turn });
        }
    }

    /// A request leaves, wherever it is. Whether it was here.
    pub fn remove(&mut self, id: RequestId) -> bool {
        let before = self.len();
        self.waiting.retain(|(waiting, _)| *waiting != id);
        self.decoding.retain(|row| row.id != id);
        self.prefilling.take_if(|(prefilling, _)| *prefilling == id);
        self.len() < before
    }

    /// Requests that wait.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    fn active(&self) -> impl Iterator<Item = (RequestId, &Demand)> {
        let decoding = self.decoding.iter().map(|row| (row.id, &row.demand));
        decoding.chain(self.prefilling.iter().map(|(id, demand)| (*id, demand)))
    }

    fn len(&self) -> usize {
        self.waiting.len() + self.active().count()
    }

    fn contains(&self, id: RequestId) -> bool {
        self.waiting.iter().any(|(waiting, _)| *waiting == id)
            || self.active().any(|(active, _)| active == id)
    }

    fn kv_bytes(&self) -> usize {
        self.active().fold(0, |sum, (_, demand)| sum.saturating_add(demand.kv_bytes))
    }

    /// Whether the first that waits may begin. Alone it always may: what is larger than the budget is not accepted.
    fn has_room(&self) -> bool {
        let active = self.active().count();
        let Some((_, first)) = self.waiting.front() else { return false };
        let fits = |budget| active == 0 || self.kv_bytes().saturating_add(first.kv_bytes) <= budget;
        active < self.bounds.max_batch && self.bounds.kv_budget.is_none_or(fits)
    }

    fn check(&self) {
        let active = self.active().count();
        debug_assert!(active <= self.bounds.max_batch, "{active} rows");
        let within = self.bounds.kv_budget.is_none_or(|budget| self.kv_bytes() <= budget);
        debug_assert!(active <= 1 || within, "{} bytes", self.kv_bytes());
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
