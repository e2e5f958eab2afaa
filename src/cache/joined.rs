//! Growing caches of several sequences in one array a layer: a step of all of them is then one update and one attention,
//! instead of as many as there are sequences, each a launch on a GPU.
//!
//! Rows are padded at the end, so nothing moves when one is longer than another; a mask hides what lies past a row's own
//! positions. A row that does anything but step with the others takes its part out: [`JoinedKvCache::export`].

use std::cell::RefCell;
use std::rc::Rc;

use super::{KvCache, LayerCache, STEP, grow};
use crate::mlx::{Array, Dtype, Error, Result};

/// Keys and values of one layer, `[rows, kv_heads, capacity, head_dim]`.
#[derive(Clone, Debug)]
pub struct JoinedRows {
    keys: Array,
    values: Array,
    /// Positions of each row.
    offsets: Vec<i32>,
}

/// One sequence's part of [`JoinedRows`].
#[derive(Debug)]
pub struct JoinedKvCache {
    rows: Rc<RefCell<JoinedRows>>,
    row: usize,
}

/// A clone stays as it is when the others go on.
impl Clone for JoinedKvCache {
    fn clone(&self) -> Self {
        Self { rows: Rc::new(RefCell::new(self.rows.borrow().clone())), row: self.row }
    }
}

impl JoinedKvCache {
    /// Positions stored.
    pub fn offset(&self) -> i32 {
        self.rows.borrow().offsets.get(self.row).copied().unwrap_or(0)
    }

    /// Keys and values alone, `[1, kv_heads, positions, head_dim]`.
    fn content(&self) -> Result<(Array, Array)> {
        let (rows, row, offset) = (self.rows.borrow(), self.row as i32, self.offset());
        let own = |array: &Array| array.slice(0, row, row + 1)?.slice(2, 0, offset);
        Ok((own(&rows.keys)?, own(&rows.values)?))
    }

    /// The same cache by itself.
    ///
    /// # Errors
    /// MLX's.
    pub fn export(&self) -> Result<LayerCache> {
        let (keys, values) = self.content()?;
        // A copy, or the others' part would stay in memory.
        let (keys, values) = (keys.contiguous()?, values.contiguous()?);
        Ok(LayerCache::Plain(KvCache::from_state(keys, values, self.offset())))
    }

    pub(super) fn trim(&mut self, n: i32) -> i32 {
        let n = n.min(self.offset());
        if let Some(offset) = self.rows.borrow_mut().offsets.get_mut(self.row) {
            *offset -= n;
        }
        n
    }

    /// Bytes of its part.
    pub(super) fn nbytes(&self) -> usize {
        let rows = self.rows.borrow();
        (rows.keys.nbytes() + rows.values.nbytes()) / rows.offsets.len().max(1)
    }
}

impl JoinedRows {
    /// The joined form of these caches, one a sequence: the one that they have, or a new one that they move into. `None`
    /// if one of them is of another kind, or empty.
    ///
    /// # Errors
    /// MLX's.
    pub(crate) fn of(caches: &mut [&mut LayerCache]) -> Result<Option<Rc<RefCell<Self>>>> {
        if let Some(rows) = Self::already(caches) {
            return Ok(Some(rows));
        }
        let mut contents = Vec::new();
        for cache in &*caches {
            contents.push(match &**cache {
                LayerCache::Joined(joined) => (joined.offset(), joined.content()?),
                LayerCache::Plain(plain) => match plain.buffers() {
                    Some((keys, values)) if plain.offset() > 0 && keys.dim(0) == 1 => {
                        let own = |array: &Array| array.slice(2, 0, plain.offset());
                        (plain.offset(), (own(keys)?, own(values)?))
                    }
                    _ => return Ok(None),
                },
                _ => return Ok(None),
            });
        }
        let offsets: Vec<i32> = contents.iter().map(|(offset, _)| *offset).collect();
        let capacity = room(offsets.iter().copied().max().unwrap_or(0))?;
        let padded = |array: &Array| grow(Some(array), array, capacity - array.dim(2));
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (_, (row_keys, row_values)) in &contents {
            keys.push(padded(row_keys)?);
            values.push(padded(row_values)?);
        }
        let (keys, values) = (Array::concatenate(&keys, 0)?, Array::concatenate(&values, 0)?);
        let rows = Rc::new(RefCell::new(Self { keys, values, offsets }));
        for (row, cache) in caches.iter_mut().enumerate() {
            **cache = LayerCache::Joined(JoinedKvCache { rows: rows.clone(), row });
        }
        Ok(Some(rows))
    }

    /// The joined form that these caches have already: all of its rows, in order.
    fn already(caches: &[&mut LayerCache]) -> Option<Rc<RefCell<Self>>> {
        let LayerCache::Joined(first) = &**caches.first()? else { return None };
        let in_place = caches.iter().enumerate().all(|(row, cache)| {
            matches!(&**cache, LayerCache::Joined(joined) if joined.row == row && Rc::ptr_eq(&joined.rows, &first.rows))
        });
        (in_place && first.rows.borrow().offsets.len() == caches.len()).then(|| first.rows.clone())
    }

    /// Positions of each row.
    pub(crate) fn offsets(&self) -> &[i32] {
        &self.offsets
    }

    /// Appends a position to each row, `[rows, kv_heads, 1, head_dim]`, and returns all up to the longest row's last:
    /// `[rows, kv_heads, longest, head_dim]`. `places` are the offsets as an array.
    ///
    /// # Errors
    /// MLX's, or a row that grows past 2^31 positions.
    pub(crate) fn update_and_fetch(
        &mut self,
        keys: &Array,
        values: &Array,
        places: &Array,
    ) -> Result<(Array, Array)> {
        let longest = self.offsets.iter().copied().max().unwrap_or(0) + 1;
        if longest > self.keys.dim(2) {
            let added = room(longest)? - self.keys.dim(2);
            self.keys = grow(Some(&self.keys), keys, added)?;
            self.values = grow(Some(&self.values), values, added)?;
        }
        let indices = places.reshape(&[-1, 1, 1, 1])?.broadcast_to(keys.shape())?;
        self.keys = self.keys.put_along_axis(&indices, keys, 2)?;
        let indices = if values.shape() == keys.shape() {
            indices
        } else {
            places.reshape(&[-1, 1, 1, 1])?.broadcast_to(values.shape())?
        };
        self.values = self.values.put_along_axis(&indices, values, 2)?;
        self.offsets.iter_mut().for_each(|offset| *offset += 1);
        Ok((self.keys.slice(2, 0, longest)?, self.values.slice(2, 0, longest)?))
    }
}

/// Offsets of the rows of a step as an array, `int32 [rows]`.
pub(crate) fn places(offsets: &[i32]) -> Result<Array> {
    Array::from_slice(offsets, &[offsets.len() as i32])
}

/// Boolean `[rows, 1, 1, longest]`: what the next position of each row attends to.
pub(crate) fn ragged_mask(offsets: &[i32], places: &Array) -> Result<Array> {
    let longest = offsets.iter().copied().max().unwrap_or(0) + 1;
    let keys = Array::arange(0.0, f64::from(longest), 1.0, Dtype::Int32)?;
    places.reshape(&[-1, 1, 1, 1])?.greater_equal(&keys)
}

/// Positions to make room for, so that the next ones fit as well.
fn room(offset: i32) -> Result<i32> {
    offset
        .checked_add(1)
        .filter(|&positions| positions < i32::MAX - STEP)
        .map(|positions| (positions + STEP - 1) / STEP * STEP)
        .ok_or_else(|| Error::new("the sequence exceeds 2^31 positions"))
}
