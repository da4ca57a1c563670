/* SPDX-License-Identifier: MIT */
/* kv_radix.h is the prefix cache of an inference engine: a radix tree over tokens, in whole pages. C11.

   An edge holds the tokens of whole pages and the numbers of the cache pages that hold their rows. One request calls:

       kv_radix_match   finds how much of the prompt is cached, and in which pages
       kv_radix_lock    keeps that path while the request runs
       kv_radix_evict   takes back the least recently used pages (if the request needs more than are free)
       kv_radix_insert  adds the request's new whole pages, so that others find them
       kv_radix_unlock  lets the path be evicted again

   The tree stores page numbers, not rows. The caller owns a page until insert takes it, then the tree owns it until
   evict returns it. There are no globals. A tree may be used by one thread at a time. If memory runs out, kv_allocate
   ends the program.

   A page may lie in a slower memory than the cache, so the tree has tiers: 0 is the cache, and each tier numbers its
   pages for itself. kv_radix_demote moves pages down a tier, in place of evicting them, and kv_radix_promote moves the
   pages of a matched path back into the cache. Along each path the tier never decreases. A tree that never
   demotes uses tier 0 alone. */
#ifndef KV_RADIX_H
#define KV_RADIX_H

#include "kv_device.h"
#include "kvprim.h"

enum { KV_RADIX_TIERS = 3 };

typedef struct kv_radix_node {
    struct kv_radix_node *parent;
    struct kv_radix_node *next;            /* in the same bucket of the table */
    struct kv_radix_node *older, *younger; /* neighbours in their tier's order of use; valid only while refs is 0 */
    uint64_t hash;                         /* of the parent and the first page */
    int32_t *tokens;                       /* page_count * page_tokens of them */
    int32_t *pages;
    size_t page_count;
    uint32_t refs; /* locks on this node and on nodes below it */
    uint32_t tier; /* where all pages of the edge lie */
} kv_radix_node;

typedef struct kv_radix { /* must not move in memory between kv_radix_init and kv_radix_free */
    size_t page_tokens;
    kv_radix_node root;                  /* an empty edge, always locked */
    kv_radix_node rings[KV_RADIX_TIERS]; /* only links: .younger is the oldest unlocked node, .older the youngest */
    kv_radix_node **table;               /* buckets of all nodes except the root, by node.hash */
    size_t table_mask;                   /* buckets - 1; the number of buckets is a power of two */
} kv_radix;

/* ---- order of use: for each tier, a ring of the unlocked nodes ---------------------------------------------------

   A path is moved to the young end from its last node up to the root. So a node is younger than all its children in the
   same tier, and the oldest node in a ring has none there: it is demoted or evicted next. A node that goes down a tier
   was used later than all that went before it, so it goes to the young end there. The ancestors of a locked node are
   locked too, and the rings hold no locked node. */

static inline void kv_radix__unlink(kv_radix_node *node)
{
    node->older->younger = node->younger;
    node->younger->older = node->older;
}

static inline void kv_radix__link(kv_radix_node *node, kv_radix_node *older)
{
    node->older = older;
    node->younger = older->younger;
    node->older->younger = node->younger->older = node;
}

/* Moves an unlocked node to the young end of a tier. */
static inline void kv_radix__renew(kv_radix *tree, kv_radix_node *node, uint32_t tier)
{
    kv_radix__unlink(node);
    node->tier = tier;
    kv_radix__link(node, tree->rings[tier].older);
}

static inline void kv_radix__touch(kv_radix *tree, kv_radix_node *node)
{
    for (; node->refs == 0; node = node->parent)
        kv_radix__renew(tree, node, node->tier);
}

/* A locked node and the nodes above it are not evicted. Locks are counted: unlock a node as often as it was locked. */
static inline void kv_radix_lock(kv_radix_node *node)
{
    for (; node; node = node->parent)
        if (node->refs++ == 0)
            kv_radix__unlink(node);
}

static inline void kv_radix_unlock(kv_radix *tree, kv_radix_node *node)
{
    for (; node; node = node->parent)
        if (--node->refs == 0)
            kv_radix__link(node, tree->rings[node->tier].older);
}

/* ---- children: one hash table for the whole tree -----------------------------------------------------------------

   In real traces a node has thousands of children. Siblings differ within their first page, so parent and first page
   identify a child. Its tokens are then compared in full, so two nodes with the same hash only cost time. */

static inline uint64_t kv_radix__hash(const kv_radix *tree, const kv_radix_node *parent, const int32_t *tokens)
{
    uint64_t h = (uint64_t)(uintptr_t)parent;
    for (size_t i = 0; i < tree->page_tokens; i++) {
        h = (h ^ (uint32_t)tokens[i]) * UINT64_C(0x9E3779B97F4A7C15);
        h ^= h >> 32;
    }
    return h;
}

/* Gives a node, whose tokens are set, its parent and its place in the table. */
static inline void kv_radix__put(kv_radix *tree, kv_radix_node *node, kv_radix_node *parent)
{
    node->parent = parent;
    node->hash = kv_radix__hash(tree, parent, node->tokens);
    kv_radix_node **const bucket = &tree->table[(size_t)node->hash & tree->table_mask];
    node->next = *bucket;
    *bucket = node;
}

static inline void kv_radix__remove(kv_radix *tree, kv_radix_node *node)
{
    kv_radix_node **at = &tree->table[(size_t)node->hash & tree->table_mask];
    while (*at != node)
        at = &(*at)->next;
    *at = node->next;
}

/* Returns the child whose edge shares at least its first page with tokens, or NULL. *same is the number of pages that
   they share. */
static inline kv_radix_node *kv_radix__child(const kv_radix *tree, const kv_radix_node *parent, const int32_t *tokens,
                                             size_t page_count, size_t *same)
{
    const size_t page = tree->page_tokens;
    const uint64_t hash = kv_radix__hash(tree, parent, tokens);
    for (kv_radix_node *node = tree->table[(size_t)hash & tree->table_mask]; node; node = node->next) {
        if (node->hash != hash || node->parent != parent)
            continue;
        const size_t tokens_same = kvprim_prefix_i32(tokens, page_count * page, node->tokens, node->page_count * page);
        *same = kvprim_prefix_pages(tokens_same, page) / page;
        if (*same > 0)
            return node;
    }
    return NULL;
}

/* ---- nodes ------------------------------------------------------------------------------------------------------- */

static inline void kv_radix__free(kv_radix_node *node)
{
    free(node->tokens);
    free(node->pages);
    free(node);
}

/* Makes a node that is in no ring. */
static inline kv_radix_node *kv_radix__new(kv_radix *tree, kv_radix_node *parent, const int32_t *tokens,
                                           const int32_t *pages, size_t page_count)
{
    const size_t token_count = page_count * tree->page_tokens;
    kv_radix_node *const node = (kv_radix_node *)kv_allocate(1, sizeof *node);
    *node = (kv_radix_node){.page_count = page_count};
    node->tokens = (int32_t *)kv_allocate(token_count, sizeof *tokens);
    node->pages = (int32_t *)kv_allocate(page_count, sizeof *pages);
    memcpy(node->tokens, tokens, token_count * sizeof *tokens);
    memcpy(node->pages, pages, page_count * sizeof *pages);
    kv_radix__put(tree, node, parent);
    return node;
}

/* Cuts an edge to its first page_count pages. If realloc fails, the edge keeps its memory. */
static inline void kv_radix__shorten(const kv_radix *tree, kv_radix_node *node, size_t page_count)
{
    int32_t *const tokens = (int32_t *)realloc(node->tokens, page_count * tree->page_tokens * sizeof *tokens);
    int32_t *const pages = (int32_t *)realloc(node->pages, page_count * sizeof *pages);
    node->tokens = tokens ? tokens : node->tokens;
    node->pages = pages ? pages : node->pages;
    node->page_count = page_count;
}

/* Inserts a new node with the first `keep` pages of the edge above `node`. `node` itself stays at its address, because
   its children and the holders of locks point to it. */
static inline kv_radix_node *kv_radix__split(kv_radix *tree, kv_radix_node *node, size_t keep)
{
    kv_radix_node *const upper = kv_radix__new(tree, node->parent, node->tokens, node->pages, keep);
    upper->refs = node->refs;
    upper->tier = node->tier;
    if (upper->refs == 0)
        kv_radix__link(upper, node);

    const size_t rest = node->page_count - keep;
    kv_radix__remove(tree, node);
    memmove(node->tokens, node->tokens + keep * tree->page_tokens, rest * tree->page_tokens * sizeof *node->tokens);
    memmove(node->pages, node->pages + keep, rest * sizeof *node->pages);
    kv_radix__shorten(tree, node, rest);
    kv_radix__put(tree, node, upper);
    return upper;
}

/* Descends from a node as far as the edges match the tokens, splits the edge where they differ, and returns the last
   node. Adds up in *done how many pages that is, and in in_tier[] where they lie. A locked node that is not in the cache
   is on its way there, for the request that holds the lock. */
static inline kv_radix_node *kv_radix__walk(kv_radix *tree, kv_radix_node *node, const int32_t *tokens,
                                            size_t page_count, int32_t *pages, size_t *done,
                                            size_t in_tier[KV_RADIX_TIERS])
{
    memset(in_tier, 0, KV_RADIX_TIERS * sizeof *in_tier);
    for (*done = 0; *done < page_count;) {
        size_t same = 0;
        kv_radix_node *child =
            kv_radix__child(tree, node, tokens + *done * tree->page_tokens, page_count - *done, &same);
        if (!child)
            break;
        if (same < child->page_count)
            child = kv_radix__split(tree, child, same);
        if (pages)
            memcpy(pages + *done, child->pages, same * sizeof *pages);
        *done += same;
        in_tier[child->refs ? 0 : child->tier] += same;
        node = child;
    }
    kv_radix__touch(tree, node);
    return node;
}

/* ---- the tree ---------------------------------------------------------------------------------------------------- */

/* Makes an empty tree of pages of page_tokens >= 1 tokens. More nodes than are announced only cost time. */
static inline void kv_radix_init(kv_radix *tree, size_t page_tokens, size_t nodes)
{
    size_t buckets = 16;
    while (buckets < nodes)
        buckets *= 2;
    memset(tree, 0, sizeof *tree);
    tree->page_tokens = page_tokens;
    tree->root.refs = 1;
    for (int tier = 0; tier < KV_RADIX_TIERS; tier++)
        tree->rings[tier].older = tree->rings[tier].younger = &tree->rings[tier];
    tree->table = (kv_radix_node **)kv_allocate(buckets, sizeof *tree->table);
    memset(tree->table, 0, buckets * sizeof *tree->table);
    tree->table_mask = buckets - 1;
}

static inline void kv_radix_free(kv_radix *tree)
{
    for (size_t i = 0; i <= tree->table_mask; i++) {
        for (kv_radix_node *node = tree->table[i], *next; node; node = next) {
            next = node->next;
            kv_radix__free(node);
        }
    }
    free(tree->table);
}

/* Finds the longest prefix of tokens[0 .. count) that the tree holds, in whole pages. Writes the numbers of these pages
   to pages[], which has room for count / page_tokens, and how many of them lie in each tier to in_tier[] (the first ones
   in tier 0, the next ones in tier 1 ...). Returns the node where the match ends. An edge that matches in part is split
   there. The whole path becomes the most recently used one. */
static inline kv_radix_node *kv_radix_match(kv_radix *tree, const int32_t *tokens, size_t count, int32_t *pages,
                                            size_t in_tier[KV_RADIX_TIERS])
{
    size_t done;
    return kv_radix__walk(tree, &tree->root, tokens, count / tree->page_tokens, pages, &done, in_tier);
}

/* Moves the last `count` pages of the path to a node into tier 0: these must be all that lie in other tiers. They get
   the numbers pages[]. Writes their former numbers to before[], which may be pages[], unless it is NULL. */
static inline void kv_radix_promote(kv_radix *tree, kv_radix_node *node, const int32_t *pages, size_t count,
                                    int32_t *before)
{
    for (; count > 0; node = node->parent) {
        count -= node->page_count;
        for (size_t i = 0; i < node->page_count; i++) {
            const int32_t had = node->pages[i];
            node->pages[i] = pages[count + i];
            if (before)
                before[count + i] = had;
        }
        node->tier = 0;
        if (node->refs == 0)
            kv_radix__renew(tree, node, 0);
    }
}

/* Adds page_count whole pages of tier 0, with their tokens, below a node that match returned and the caller has locked.
   If other requests have added the first of them since, the tree keeps theirs, and the caller's still belong to the
   caller: pages[0 .. known[0]). Those of the others that have gone down meanwhile are given back in exchange for the
   caller's: the next known[1] entries of pages[] are now numbers in tier 1, and so on. The other pages now belong to
   the tree. */
static inline void kv_radix_insert(kv_radix *tree, kv_radix_node *node, const int32_t *tokens, int32_t *pages,
                                   size_t page_count, size_t known[KV_RADIX_TIERS])
{
    size_t done;
    node = kv_radix__walk(tree, node, tokens, page_count, NULL, &done, known);
    kv_radix_promote(tree, node, pages + known[0], done - known[0], pages + known[0]);
    if (done == page_count)
        return;
    kv_radix_node *const leaf =
        kv_radix__new(tree, node, tokens + done * tree->page_tokens, pages + done, page_count - done);
    kv_radix__link(leaf, tree->rings[0].older);
    kv_radix__touch(tree, node); /* a leaf is older than its parent */
}

/* Takes up to `want` pages of the lowest tier in use out of the tree, the least recently used first and each path from
   its end. Writes their numbers to pages[] and returns how many there are: fewer than `want` only if everything left in
   the tier is locked. */
static inline size_t kv_radix_evict(kv_radix *tree, uint32_t tier, size_t want, int32_t *pages)
{
    const kv_radix_node *const ring = &tree->rings[tier];
    size_t got = 0;
    while (got < want && ring->younger != ring) {
        kv_radix_node *const leaf = ring->younger;
        const size_t take = leaf->page_count < want - got ? leaf->page_count : want - got;
        const size_t keep = leaf->page_count - take;
        memcpy(pages + got, leaf->pages + keep, take * sizeof *pages);
        got += take;
        if (keep > 0) {
            kv_radix__shorten(tree, leaf, keep);
            continue;
        }
        kv_radix__unlink(leaf);
        kv_radix__remove(tree, leaf);
        kv_radix__free(leaf);
    }
    return got;
}

/* Moves up to `want` pages, chosen as kv_radix_evict does, from a tier to a lower one that is the next in use, where
   they get the first numbers of below[]. Writes the numbers that they had to pages[], and returns how many there are. */
static inline size_t kv_radix_demote(kv_radix *tree, uint32_t from, uint32_t to, size_t want, const int32_t *below,
                                     int32_t *pages)
{
    const kv_radix_node *const ring = &tree->rings[from];
    size_t got = 0;
    while (got < want && ring->younger != ring) {
        kv_radix_node *const node = ring->younger; /* keeps the end of its edge if that is split */
        if (node->page_count > want - got)
            kv_radix__split(tree, node, node->page_count - (want - got));
        memcpy(pages + got, node->pages, node->page_count * sizeof *pages);
        memcpy(node->pages, below + got, node->page_count * sizeof *pages);
        got += node->page_count;
        kv_radix__renew(tree, node, to);
    }
    return got;
}

/* Returns NULL, or a text that names the invariant that does not hold. Takes quadratic time: for tests. */
static inline const char *kv_radix_check(const kv_radix *tree)
{
    size_t unlocked = 0, listed = 0, same = 0;
    for (size_t i = 0; i <= tree->table_mask; i++) {
        for (const kv_radix_node *node = tree->table[i]; node; node = node->next) {
            unlocked += node->refs == 0;
            if (node->page_count == 0)
                return "an edge is empty";
            if (node->parent->refs < node->refs)
                return "a node has more locks than its parent";
            if (node->parent->tier > node->tier && node->parent->refs == 0)
                return "a node lies above its parent's tier";
            if (kv_radix__child(tree, node->parent, node->tokens, node->page_count, &same) != node ||
                same != node->page_count)
                return "a node is not found by its tokens";
        }
    }
    for (uint32_t tier = 0; tier < KV_RADIX_TIERS; tier++) {
        const kv_radix_node *const ring = &tree->rings[tier];
        for (const kv_radix_node *node = ring->younger; node != ring; node = node->younger, listed++) {
            const kv_radix_node *parent = node;
            if (node->refs != 0 || node->tier != tier || node->younger->older != node)
                return "the order of use holds a locked node, one of another tier, or a broken link";
            while (node->parent->refs == 0 && node->parent->tier == tier && parent != node->parent)
                if ((parent = parent->younger) == ring)
                    return "a node is not younger than its child";
        }
    }
    return listed == unlocked ? NULL : "the order of use misses a node";
}

#endif /* KV_RADIX_H */
