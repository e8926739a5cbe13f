/* GET and SET of pages on one connection of Redis, checksums and headers included.
 *
 * It talks as long as the server answers what is expected of a healthy one: the page that was asked for, nothing, or
 * OK. At the first other answer it leaves the connection, which must then be closed, and all pages without a result to
 * page_calls.py, which finds out what is wrong. So nothing here judges a server, and nothing here needs to be forgiving:
 * replies are compared with the few that are expected, and no number of a server becomes a length.
 *
 * One thread at a time talks on a socket. Several may share the pages of a call, each with positions of its own.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>

#include "core.h"

enum { LEFT, DONE, OTHERWISE };           /* Of a page. OTHERWISE: not there to be read, or there already. */
enum { ENDED, UNEXPECTED, CLOSED, LATE }; /* Of a talk; or -errno. Only after ENDED may the connection be used on. */
enum {
    TEXT_BYTES = 64 << 10,
    REST_BYTES = 4 << 10,
    RECEIVED_AT_ONCE = 512 << 10, /* By one system call: what is hashed must still be in the processor's cache. */
    SENT_AT_ONCE = 256 << 10,     /* Bytes of small pages gathered for one system call. */
    TAIL_BYTES = 256,             /* Received behind a page: its line end, and the head of the next reply. */
    NAME_BYTES = 97,              /* Identity and page hash in hexadecimal, with a colon between them. */
    TIMER_SLACK = 50000000,       /* Nanoseconds by which a timer may be off: setting it costs a system call. */
    SHORTEST_TIMER = 1000000,
};

struct text {
    const char *at;
    int64_t length;
};

/* What is sent and answered around pages of one size. */
struct page_words {
    int64_t start[2];                          /* The first 16 bytes of every header. */
    struct text get_head, length_head, set_head; /* GET, STRLEN and SET up to the page's name in hexadecimal. */
    struct text set_tail, set_end;             /* SET between name and value, and behind the value. */
    struct text expected, there;               /* The replies to GET, up to its value, and to STRLEN. */
};

static const struct text LINE_END = {"\r\n", 2}, NOTHING = {"$-1\r\n", 5}, MISSING = {":0\r\n", 4},
                         STORED = {"+OK\r\n", 5};

struct get_pages {
    const struct memory *memory; /* Receives the pages. */
    const int64_t *keys;
    const struct page_words *words; /* Of pages of memory->payload bytes. */
    int64_t *results;               /* LEFT before; receives what became of each page. */
    const int64_t *positions;       /* Which pages this talk is about. */
    int64_t position_count;
    int64_t socket;
    int64_t deadline; /* CLOCK_MONOTONIC in nanoseconds. */
    int64_t window;   /* Bytes of values that may be under way. */
};

struct set_pages {
    struct get_pages pages;
    int64_t created;      /* Wall-clock milliseconds. */
    const char *question; /* PING of a word that nobody knows. It ends as its answer does. */
    int64_t question_length;
    int64_t answer_length;
};

/* A call on its way. A function that returns a bool of success has put the reason for its failure into `status`. */
struct talk {
    struct get_pages call;
    int64_t status;
    int64_t sent;       /* Of the positions. */
    int64_t most;       /* Pages under way. */
    int64_t timers[2];  /* When that of receiving and of sending was set. 0: not by this talk. */
    int64_t begin, end; /* What `rest` holds that no reply has used. */
    void *state;
    uint64_t header[HEADER_WORDS], right_header[HEADER_WORDS];
    struct iovec pieces[IOV_MAX];
    char rest[REST_BYTES], text[TEXT_BYTES];
    int64_t waiting[]; /* A word for each position. */
};

static bool fail(struct talk *talk, int64_t status)
{
    talk->status = status;
    return false;
}

/* -- the socket ---------------------------------------------------------------------------------------------------- */

/* Receives or sends `pieces`; false when the deadline has passed or the connection is of no use. *moved: how many bytes,
 * which may be 0 when nothing moved in time. */
static bool move(struct talk *talk, bool is_send, struct iovec *pieces, int64_t count, int64_t *moved)
{
    const int64_t second = 1000000000;
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)count};
    int socket = (int)talk->call.socket;
    struct timespec clock;
    clock_gettime(CLOCK_MONOTONIC, &clock);
    int64_t now = clock.tv_sec * second + clock.tv_nsec, left = talk->call.deadline - now;
    if (left <= 0)
        return fail(talk, LATE);
    if (talk->timers[is_send] == 0 || now - talk->timers[is_send] > TIMER_SLACK) {
        left = left > SHORTEST_TIMER ? left : SHORTEST_TIMER;
        struct timeval timer = {left / second, left % second / 1000};
        setsockopt(socket, SOL_SOCKET, is_send ? SO_SNDTIMEO : SO_RCVTIMEO, &timer, sizeof timer);
        talk->timers[is_send] = now;
    }
    *moved = is_send ? sendmsg(socket, &message, MSG_NOSIGNAL) : recvmsg(socket, &message, 0);
    if (*moved < 0) {
        *moved = 0;
        return errno == EAGAIN || errno == EINTR ? true : fail(talk, -errno);
    }
    return *moved > 0 || is_send ? true : fail(talk, CLOSED);
}

/* Sends all of the first `count` pieces, which are used up. */
static bool send_pieces(struct talk *talk, int64_t count)
{
    struct iovec *piece = talk->pieces, *end = piece + count;
    int64_t sent;
    while (piece < end) {
        if (!move(talk, true, piece, end - piece, &sent))
            return false;
        for (; piece < end && (size_t)sent >= piece->iov_len; piece++)
            sent -= (int64_t)piece->iov_len;
        if (piece < end) {
            piece->iov_base = (char *)piece->iov_base + sent;
            piece->iov_len -= (size_t)sent;
        }
    }
    return true;
}

/* Fills the first `count` pieces with what has arrived; how many bytes, or 0 after a failure. */
static int64_t receive(struct talk *talk, int64_t count)
{
    int64_t received = 0;
    while (received == 0 && move(talk, false, talk->pieces, count, &received))
        ;
    return received;
}

/* -- requests and replies ------------------------------------------------------------------------------------------ */

static char *append(char *at, struct text text)
{
    memcpy(at, text.at, (size_t)text.length);
    return at + text.length;
}

/* Writes `head`, the name of a page and `tail` at `at`; the end of them. */
static char *append_request(const struct talk *talk, char *at, struct text head, int64_t page, struct text tail)
{
    const uint8_t *key = (const uint8_t *)(talk->call.keys + page * KEY_WORDS);
    at = append(at, head);
    for (int byte = 0; byte < 8 * KEY_WORDS; byte++) {
        if (byte == 8 * IDENTITY_WORDS)
            *at++ = ':';
        *at++ = "0123456789abcdef"[key[byte] >> 4];
        *at++ = "0123456789abcdef"[key[byte] & 15];
    }
    return append(at, tail);
}

/* Sends as many requests as there is room for, up to position `until`; behind the last of all positions `question`. */
static bool ask(struct talk *talk, struct text head, int64_t until, struct text question)
{
    const struct get_pages *call = &talk->call;
    char *end = talk->text, *last = end + TEXT_BYTES - head.length - NAME_BYTES - LINE_END.length - question.length;
    while (talk->sent < until && talk->sent < call->position_count && end <= last)
        end = append_request(talk, end, head, call->positions[talk->sent++], LINE_END);
    if (talk->sent == call->position_count)
        end = append(end, question);
    talk->pieces[0] = (struct iovec){talk->text, (size_t)(end - talk->text)};
    return send_pieces(talk, end > talk->text);
}

/* Whether what is in `rest` begins with `text`, as far as it has come. */
static bool begins_with(const struct talk *talk, struct text text)
{
    int64_t come = talk->end - talk->begin;
    return memcmp(talk->rest + talk->begin, text.at, (size_t)(come < text.length ? come : text.length)) == 0;
}

/* Takes the next reply, which must be `one` or `other`: whether it is `one`, or -1 after a failure. */
static int take(struct talk *talk, struct text one, struct text other)
{
    for (;;) {
        int64_t come = talk->end - talk->begin;
        bool may_be_one = begins_with(talk, one), may_be_other = begins_with(talk, other);
        if (may_be_one && come >= one.length) {
            talk->begin += one.length;
            return 1;
        }
        if (may_be_other && come >= other.length) {
            talk->begin += other.length;
            return 0;
        }
        if ((!may_be_one && !may_be_other) || come == REST_BYTES)
            return -1 + fail(talk, UNEXPECTED);
        memmove(talk->rest, talk->rest + talk->begin, (size_t)come);
        talk->pieces[0] = (struct iovec){talk->rest + come, (size_t)(REST_BYTES - come)};
        talk->begin = 0;
        talk->end = come + receive(talk, 1);
        if (talk->end == come)
            return -1;
    }
}

/* -- GET ----------------------------------------------------------------------------------------------------------- */

/* The header, where `number` is -1, or a segment of a page. */
static struct iovec piece_of(struct talk *talk, int64_t page, int64_t number)
{
    const struct memory *memory = talk->call.memory;
    if (number < 0)
        return (struct iovec){talk->header, HEADER_BYTES};
    void *place = (void *)memory->addresses[page * memory->segment_count + number];
    return (struct iovec){place, (size_t)memory->segments[number]};
}

/* Receives the header and payload of a page, whose length was read. What comes behind them is in `rest`. */
static bool receive_page(struct talk *talk, int64_t page)
{
    const struct memory *memory = talk->call.memory;
    int64_t missing = HEADER_BYTES + memory->payload;
    int64_t segment = -1; /* In which the next byte goes, */
    size_t offset = 0;    /* and where. */
    of_others.reset(talk->state);
    while (missing > 0) {
        int64_t count = 0, wanted = 0, moved;
        for (int64_t at = segment; at < memory->segment_count && wanted < RECEIVED_AT_ONCE; at++) {
            struct iovec piece = piece_of(talk, page, at);
            size_t skipped = at == segment ? offset : 0, room = (size_t)(RECEIVED_AT_ONCE - wanted);
            size_t length = piece.iov_len - skipped < room ? piece.iov_len - skipped : room;
            if (count == IOV_MAX - 1) /* One is for what comes behind. */
                break;
            talk->pieces[count++] = (struct iovec){(char *)piece.iov_base + skipped, length};
            wanted += (int64_t)length;
        }
        if (talk->begin < talk->end) {
            /* This came behind the page before. */
            int64_t kept = talk->end - talk->begin, room = (int64_t)talk->pieces[0].iov_len;
            moved = kept < room ? kept : room;
            memcpy(talk->pieces[0].iov_base, talk->rest + talk->begin, (size_t)moved);
            talk->begin += moved;
        } else {
            talk->pieces[count] = (struct iovec){talk->rest, TAIL_BYTES};
            moved = receive(talk, count + (wanted == missing));
            if (moved == 0)
                return false;
            talk->begin = 0;
            talk->end = moved > wanted ? moved - wanted : 0;
            moved -= talk->end;
        }
        missing -= moved;
        while (moved > 0) {
            struct iovec piece = piece_of(talk, page, segment);
            size_t left = piece.iov_len - offset, length = (size_t)moved < left ? (size_t)moved : left;
            if (segment >= 0)
                of_others.update(talk->state, (char *)piece.iov_base + offset, length);
            moved -= (int64_t)length;
            offset += length;
            if (offset == piece.iov_len) {
                segment++;
                offset = 0;
            }
        }
    }
    return true;
}

/* Whether what was received is this page. */
static bool is_page(struct talk *talk, int64_t page)
{
    uint64_t of_header[2];
    write_sealed(talk->right_header, talk->call.words->start, talk->call.keys + page * KEY_WORDS,
                 talk->call.memory->payload, of_others.digest(talk->state));
    hash_of_header(talk->header, CHECKED_BYTES, of_header);
    return memcmp(talk->header, talk->right_header, SEALED_BYTES) == 0 &&
           memcmp(talk->header + HEADER_CHECKSUM_WORD, of_header, sizeof of_header) == 0;
}

static bool get(struct talk *talk)
{
    const struct page_words *words = talk->call.words;
    for (int64_t number = 0; number < talk->call.position_count; number++) {
        int64_t page = talk->call.positions[number];
        if (talk->sent - number <= talk->most / 2 &&
            !ask(talk, words->get_head, number + talk->most, (struct text){"", 0}))
            return false;
        int is_there = take(talk, words->expected, NOTHING);
        if (is_there < 0 || (is_there && (!receive_page(talk, page) || take(talk, LINE_END, LINE_END) < 0)))
            return false;
        if (is_there && !is_page(talk, page))
            return fail(talk, UNEXPECTED);
        talk->call.results[page] = is_there ? DONE : OTHERWISE;
    }
    return talk->begin == talk->end || fail(talk, UNEXPECTED);
}

/* -- SET ----------------------------------------------------------------------------------------------------------- */

/* Sends pages of `waiting`, as many as one system call takes, up to `until`; behind the last of all the question. */
static bool send_pages(struct talk *talk, const struct set_pages *call, int64_t until, int64_t absent)
{
    const struct memory *memory = talk->call.memory;
    const struct page_words *words = talk->call.words;
    int64_t count = 0, total = 0;
    char *end = talk->text, *begin;
    char *last = end + TEXT_BYTES - words->set_head.length - NAME_BYTES - words->set_tail.length - HEADER_BYTES;
    while (talk->sent < until && talk->sent < absent && total < SENT_AT_ONCE && end <= last &&
           count + memory->segment_count + 3 <= IOV_MAX) { /* With the question. */
        int64_t page = talk->waiting[talk->sent++];
        begin = end;
        end = append_request(talk, end, words->set_head, page, words->set_tail);
        write_sealed(talk->header, words->start, talk->call.keys + page * KEY_WORDS, memory->payload,
                     checksum_of(talk->state, memory, page));
        finish_header(talk->header, call->created);
        end = append(end, (struct text){(const char *)talk->header, HEADER_BYTES});
        talk->pieces[count++] = (struct iovec){begin, (size_t)(end - begin)};
        for (int64_t segment = 0; segment < memory->segment_count; segment++)
            talk->pieces[count++] = piece_of(talk, page, segment);
        talk->pieces[count++] = (struct iovec){(void *)words->set_end.at, (size_t)words->set_end.length};
        total += HEADER_BYTES + memory->payload;
    }
    if (count == 0)
        return fail(talk, UNEXPECTED); /* A page of more pieces or longer words than there is room for. */
    if (talk->sent == absent)
        talk->pieces[count++] = (struct iovec){(void *)call->question, (size_t)call->question_length};
    return send_pieces(talk, count);
}

static bool set(struct talk *talk, const struct set_pages *call)
{
    struct text question = {call->question, call->question_length};
    /* Where it follows the last reply, no reply was one too many. */
    struct text answer = {question.at + question.length - call->answer_length, call->answer_length};
    const int64_t *positions = talk->call.positions;
    int64_t count = talk->call.position_count, absent = 0;
    /* Which are there: their payload need not be sent. */
    for (int64_t number = 0; number < count; number++) {
        if (number == talk->sent && !ask(talk, talk->call.words->length_head, count, question))
            return false;
        talk->waiting[number] = take(talk, talk->call.words->there, MISSING);
        if (talk->waiting[number] < 0)
            return false;
    }
    if (count > 0 && take(talk, answer, answer) < 0)
        return false;
    for (int64_t number = 0; number < count; number++) {
        if (talk->waiting[number])
            talk->call.results[positions[number]] = OTHERWISE;
        else
            talk->waiting[absent++] = positions[number];
    }
    talk->sent = 0;
    for (int64_t number = 0; number < absent; number++) {
        while (talk->sent < absent && talk->sent - number <= talk->most / 2)
            if (!send_pages(talk, call, number + talk->most, absent))
                return false;
        int is_stored = take(talk, STORED, NOTHING);
        if (is_stored < 0)
            return false;
        /* Told after the answer to the question: a reply too many would make each the next page's. */
        if (!is_stored)
            talk->waiting[number] = -1;
    }
    if (absent > 0 && take(talk, answer, answer) < 0)
        return false;
    if (talk->begin != talk->end)
        return fail(talk, UNEXPECTED);
    /* One that came in between is looked at by page_calls.py. */
    for (int64_t number = 0; number < absent; number++)
        if (talk->waiting[number] >= 0)
            talk->call.results[talk->waiting[number]] = DONE;
    return true;
}

/* Gets, or sets where there is something to set. */
static int64_t run(const struct get_pages *call, const struct set_pages *what)
{
    struct talk *talk = malloc(sizeof *talk + 8 * (size_t)call->position_count);
    void *state = of_others.new_state();
    int64_t status = -ENOMEM, size = HEADER_BYTES + call->memory->payload;
    if (talk != NULL && state != NULL) {
        memset(talk, 0, offsetof(struct talk, header));
        talk->call = *call;
        talk->state = state;
        /* While one page is received or answered another is under way, however large they are. */
        talk->most = call->window / size > 2 ? call->window / size : 2;
        status = (what == NULL ? get(talk) : set(talk, what)) ? ENDED : talk->status;
    }
    of_others.free_state(state);
    free(talk);
    return status;
}

/* GETs the pages, one after the other; how it ended. What `results` calls DONE or OTHERWISE holds, however it ended; the
 * memory of other pages may hold anything. */
PUBLIC int64_t hicache_get_pages(const struct get_pages *call) { return run(call, NULL); }

/* STRLEN, then SET NX of what is not there, in the same way. */
PUBLIC int64_t hicache_set_pages(const struct set_pages *call) { return run(&call->pages, call); }
